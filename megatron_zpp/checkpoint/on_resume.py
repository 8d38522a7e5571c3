"""What a resume does with each setting that differs from the checkpoint's: one table, and the check that reads it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_zpp.settings.flags import setting_of
from megatron_zpp.settings.groups import Settings

from .files import CheckpointError
from .tokenizer import check_tokenizer

# The run is refused: {flag that lets them differ: (what they make up, their names)}.
MUST_EQUAL = {
    "--override-batch-size": (
        "the batch size is",
        "global_batch_size rampup_batch_size step_batch_size_schedule decrease_batch_size_if_needed",
    ),
    "--override-data": (
        "the data are",
        "data_path split train_data_path valid_data_path test_data_path data_args_path per_split_data_args_path "
        "dataloader_type sft mock_data eod_mask_loss reset_position_ids reset_attention_mask fim_data "
        "fim_rate fim_spm_rate fim_prefix_token fim_middle_token fim_suffix_token seq_length seed tokenizer_type "
        "tiktoken_pattern tiktoken_num_special_tokens tokenizer_hf_no_include_special_tokens "
        "curriculum_min_length curriculum_max_length curriculum_iters curriculum_length_step",
    ),
    "--override-opt_param-scheduler": ("the learning rates are", "decoupled_lr decoupled_min_lr"),
    "--no-load-optim": ("the optimizer is", "optimizer"),
}

# The run is refused as well, by other checks: they compare what follows from these settings.
COMPARED_ELSEWHERE = {
    # training.setup: the model's config, and of adapters shapes and scale
    "model": """
        architecture num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention
        num_query_groups max_position_embeddings position_embedding_type rope_type rotary_base rotary_base_local
        no_rope_freq rotary_seq_len_interpolation_factor rotary_percent rotary_interleaved use_rope_scaling
        rope_scaling_factor yarn_rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast
        yarn_beta_slow no_yarn_correction_range_round_to_int mscale mscale_all_dim multi_latent_attention q_lora_rank
        kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim latent_norm_epsilon window_size window_attn_skip_freq
        softmax_scale softmax_type attn_logit_softcapping final_logit_softcapping embedding_multiplier
        residual_multiplier logits_scaling make_vocab_size_divisible_by padded_vocab_size vocab_size normalization
        norm_epsilon apply_layernorm_1p qk_layernorm qk_layernorm_whole no_pre_norms post_self_attn_layernorm
        post_mlp_layernorm geglu quick_geglu squared_relu glu_linear_offset activation_func_clamp_value swiglu
        no_bias_gelu_fusion disable_bias_linear add_qkv_bias num_experts moe_layer_freq moe_first_layer
        moe_experts_per_layer moe_residual moe_ffn_hidden_size moe_shared_expert_intermediate_size
        moe_shared_expert_gate moe_router_num_groups moe_router_group_topk moe_router_bias moe_router_topk
        moe_router_score_function moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_pre_softmax
        moe_router_topk_scaling_factor moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
        moe_expert_capacity_factor moe_eval_capacity_factor moe_min_capacity untie_embeddings_and_output_weights
        tie_embeddings_and_output_weights lora_rank lora_alpha lora_target_modules
    """,
    # optim.schedule.resume_schedule: all values that a later step depends on
    "schedule": """
        lr min_lr weight_decay start_weight_decay end_weight_decay weight_decay_incr_style lr_decay_style lr_decay_iters
        lr_decay_samples lr_decay_tokens lr_warmup_style lr_warmup_tokens lr_warmup_iters lr_warmup_samples
        lr_warmup_fraction lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples
    """,
    # data.order.check_order; trained.plan_resume, which says what starts over
    "order and islands": "train_iters train_samples train_tokens data_order_stable mid_level_dataset_surplus islands",
}

# The run goes on with the flags' value, and a note says so: these change what it learns, or how exactly.
NOTED = """
    attention_dropout hidden_dropout calculate_per_token_loss loss_spike_factor
    clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum
    muon_momentum muon_use_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_period
    muon_momentum_bits muon_stale_rows
    bf16 fp16 accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 loss_scale min_loss_scale loss_scale_window
    hysteresis fp8_format fp8_recipe first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    pretrained_checkpoint
    zero_quantized_weights zero_quantized_gradients zeropp_loco zeropp_loco_beta zeropp_loco_reset_interval
    zeropp_loco_reset zeropp_loco_hops zeropp_loco_error_dtype zeropp_weight_bits zeropp_weight_scaling
    zeropp_weight_intra_bits zeropp_weight_intra_scaling zeropp_weight_block_size zeropp_gradient_bits
    zeropp_gradient_scaling zeropp_gradient_bits_warmup zeropp_gradient_intra_bits zeropp_gradient_intra_scaling
    zeropp_gradient_block_size zeropp_weight_rounding zeropp_gradient_rounding zeropp_gradient_sum_dtype
    zeropp_secondary_dtype zeropp_weight_moves zeropp_hadamard zeropp_scale_dtype zeropp_gradient_element_scales
    zeropp_frozen_dtype moe_token_bits
    island_sync_interval island_outer_optimizer island_outer_lr island_outer_momentum island_bits island_block_size
    island_scaling island_dtype island_loco island_loco_beta island_fragments island_sync_delay island_merge_alpha
"""

# Nothing is said: layout, speed, output, what only the start of a run uses, and a recipe, which sets flags above.
FREE = """
    zeropp zeropp_redecide zeropp_loss_budget
    preset init_method_std initial_loss_scale
    micro_batch_size eval_iters eval_global_batch_size eval_interval eval_tasks eval_tasks_path eval_tasks_interval
    eval_tasks_limit deterministic_mode skip_train dry_run dry_run_world_size exit_interval exit_duration_in_mins
    exit_signal_handler no_check_for_nan_in_loss_and_grad max_nonfinite_steps manual_gc manual_gc_interval use_apex
    override_opt_param_scheduler use_checkpoint_opt_param_scheduler
    recompute_activations recompute_granularity recompute_modules recompute_method recompute_num_layers
    compile activation_memory_budget cpu_offloading_num_layers
    zero_stage cpu_offload zeropp_monitor_interval deepspeed_config zero_hpz_partition_size zeropp_ranks_per_node
    zeropp_offload_gradient_sums zeropp_check_agreement island_offload
    data_cache_path no_mmap_bin_files pad_last_valid_sample num_workers tokenizer_model vocab_file merge_file
    save overwrite_save save_interval no_async_save save_retain_interval save_keep_last load ckpt_step
    exit_on_missing_checkpoint verify_checkpoint load_latest_good override_batch_size override_data finetune
    no_save_optim no_save_rng no_load_optim no_load_rng publish publish_interval publish_anchor_interval
    log_interval log_throughput log_params_norm log_num_zeros_in_grad log_straggler peak_tflops tensorboard_dir
    tensorboard_log_interval tensorboard_queue_size log_timers_to_tensorboard log_validation_ppl_to_tensorboard
    log_memory_to_tensorboard log_world_size_to_tensorboard wandb_project wandb_exp_name wandb_entity wandb_save_dir
    profile use_pytorch_profiler profile_step_start profile_step_end profile_ranks profile_dir record_memory_history
    distributed_backend distributed_timeout_minutes num_distributed_optimizer_instances
    local_ranks local_nodes tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size
    pipeline_schedule num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
    decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers account_for_embedding_in_pipeline_split
    account_for_loss_in_pipeline_split context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
"""


def check_settings(settings: Settings, meta: Mapping[str, Any], finetunes: bool = False) -> list[str]:
    """Compare the run's settings with those saved; return notes on what changed. Older checkpoints may lack some.

    finetunes: the run takes the parameters alone, so that all of these may differ.
    Raises CheckpointError if a setting differs that must be equal, or a file of the tokenizer.
    """
    ours, saved = json.loads(json.dumps(settings.as_flat_dict())), meta["settings"]
    if finetunes:
        others = [*(names for _, names in MUST_EQUAL.values()), *COMPARED_ELSEWHERE.values(), NOTED]
        may_change = " ".join(names for names in others if names != COMPARED_ELSEWHERE["model"])
        changed = _differing(may_change, ours, saved)
        return [f"fine-tuning changes the run: {changed}"] if changed else []
    for override, (what, names) in MUST_EQUAL.items():
        if ours[setting_of(override)]:
            continue
        if differing := _differing(names, ours, saved):
            raise CheckpointError(f"{what} not the checkpoint's: {differing}. Give the same, or {override}")
    if not ours["override_data"]:
        check_tokenizer(ours, meta.get("files", {}))
    changed = _differing(NOTED, ours, saved)
    return [f"changed since the checkpoint was saved: {changed}"] if changed else []


def _differing(names: str, ours: Mapping[str, Any], saved: Mapping[str, Any]) -> str:
    """List the settings whose values differ: "clip_grad 1.0 there, 0.5 here"."""
    differing = []
    for name in names.split():
        here, there = ours[name], saved.get(name, ours[name])
        if name.startswith("fim_") and not ours["fim_data"] and name != "fim_data":
            continue  # has no effect
        if _comparable(name, here) != _comparable(name, there):
            differing.append(f"{name} {there} there, {here} here")
    return "; ".join(differing)


def _comparable(name: str, value: Any) -> Any:
    """Return the names of files, which may be in another folder, or any other value."""
    if not name.endswith("_path"):
        return value
    paths = value if isinstance(value, list | tuple) else [value] if value else []
    return [Path(path).name if isinstance(path, str) else path for path in paths]
