"""Flags of Megatron that leave the model as it is. An import refuses any other flag that is on, unless it reads it."""

from __future__ import annotations

_READ = """
num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups kv_channels
max_position_embeddings seq_length position_embedding_type add_position_embedding use_rotary_position_embeddings
rotary_percent rotary_base rotary_interleaved use_rope_scaling rope_scaling_factor yarn_rotary_scaling_factor
yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow window_size normalization norm_epsilon
layernorm_epsilon apply_layernorm_1p qk_layernorm swiglu bias_gelu_fusion add_bias_linear add_qkv_bias
attention_dropout hidden_dropout init_method_std untie_embeddings_and_output_weights num_experts num_key_value_heads
moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_score_function moe_router_pre_softmax
moe_router_topk_scaling_factor moe_aux_loss_coeff moe_z_loss_coeff moe_expert_capacity_factor
moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_num_groups moe_router_group_topk quick_geglu
squared_relu glu_linear_offset activation_func_clamp_value softmax_scale no_rope_freq window_attn_skip_freq
rotary_seq_len_interpolation_factor
"""
READ = frozenset(_READ.split())

# Beginnings of names.
_NEUTRAL = (
    # Data and batches
    "batch_ blend create_attention_mask curriculum data_ dataloader dataset eod_mask epoch eval_ full_validation "
    "global_batch legacy_tokenizer make_vocab merge_file micro_batch mid_level mock_data multiple_valid_sets "
    "multiple_validation num_dataset num_workers object_storage padded_vocab per_split rampup reset_ sample_rate sft "
    "short_seq split test_ tiktoken tokenizer train_ valid_ variable_seq vocab_ s3_cache allow_ambiguous_pad null_tok "
    # Optimizers and schedules
    "adam_ clip_grad decoupled_ end_weight finetune hysteresis initial_loss_scale iteration loss_scale lr "
    "min_loss_scale min_lr muon_ optimizer override_ seed sgd_ start_weight use_checkpoint_ warmup weight_decay "
    "check_for check_weight calculate_per_token skipped_ skip_train cosine decay_ "
    # Files and logs
    "async_ auto_detect ckpt_ checkpoint consumed dist_ckpt exit inprocess_ load log_ logging_ non_persistent "
    "one_logger path_to_cache profile record_ replication rerun_ save straggler tensorboard timing_ use_dist_ckpt "
    "use_persistent verify_ wandb_ world_size rank result_ error_ disable_straggler enable_ft enable_gloo "
    "enable_one_logger enable_msc goodput run_workload "
    # Layouts and communication
    "accumulate_allreduce align_ barrier_ context_parallel cp_ ddp_ deepscale deepspeed defer_ delay_ distribute_ "
    "distributed_ ds_ expert_model expert_tensor fsdp gloo gradient_ hierarchical_ high_prio keep_fp8 lazy_mpu local_ "
    "microbatch_group nccl_ num_distributed num_layers_per_virtual outer_dp overlap_ partition_ pipeline_ "
    "sequence_parallel sharp_ suggested tensor_ tp_ transformer_pipeline use_cpu use_custom use_distributed "
    "use_megatron_fsdp use_nccl use_ring use_sharp use_torch_fsdp use_tp_pp virtual_ zero_ init_model_with "
    "decoder_first decoder_last decoder_pipeline decoder_seq decoder_num encoder_num encoder_pipeline encoder_seq "
    "encoder_tensor account_for create_all ulysses remote_device use_pin "
    # Precision, memory and kernels
    "activation_func_fp8 apply_query_key apply_rope_fusion attention_backend attention_softmax autocast bf16 "
    "bias_dropout bias_swiglu cpu_ cross_entropy cuda_ cudagraph deallocate_ deterministic disable_bf16 disable_mamba "
    "empty_unused exp_avg external_cuda fine_grained first_last first_residual flash_ fp16 fp32_ fp4 fp8 grad_ "
    "inference_ kitchen main_ manual_gc masked_softmax max_tokens memory_ min_offloaded moe_deepep moe_enable_deepep "
    "moe_extended moe_flex moe_grouped_gemm moe_hybridep moe_layer_recompute moe_pad moe_per_layer moe_permute "
    "moe_router_bias_update moe_router_dtype moe_router_fusion moe_router_padding moe_shared_expert_overlap "
    "moe_token_ moe_upcycling moe_use_ no_ num_layers_at mlp_chunks nvtx offload_ params_ persist_ precision quant_ "
    "recompute_ reuse_ store_param symmetric_ te_ transformer_impl transformer_engine trust_ use_flash use_fused "
    "use_kitchen use_legacy use_mcore use_one_sent use_precision use_te use_transformer_engine qk_clip_ mxfp8 "
    "enable_cuda_graph enable_full embedding_init init_method_xavier output_bert model_type mtp_loss use_deprecated "
    "yaml_cfg "
    # Of models that other flags switch on, which must be off
    "beta_ bert_ biencoder block_data classes_ dino_ dsa_ embedding_path evidence_data faiss heterogeneous_ ict_ img_ "
    "indexer_ iter_per kv_ linear_conv_ linear_key_ linear_num_ linear_value_ mamba_ mrope mscale num_channels "
    "num_classes onnx_ original_max patch_ q_lora qa_data qk_head qk_pos query_in retriever_ retro_ rope_type "
    "rotary_scaling swin_ titles_ use_mamba v_head vision_ mask_type "
)
NEUTRAL = tuple(_NEUTRAL.split())
