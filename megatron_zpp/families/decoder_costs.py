"""Costs of a decoder: FLOPs per token, and the bytes that autograd keeps per block."""

from megatron_zpp.families.architecture import BlockActivations
from megatron_zpp.models.decoder import DecoderConfig


def flops_per_token(config: DecoderConfig, seq_length: int) -> float:
    """Count floating-point operations per token of one forward and backward pass, by Megatron-LM's convention.

    Each weight of a linear layer costs 6 (a multiplication and an addition, once forward and twice backward), the
    output layer with its padded vocabulary included. Attention is causal: a token attends to half of the sequence, or
    of its window. Embedding look-ups, norms and activation recomputation count nothing.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.multi_latent_attention:
        key_dim, value_dim = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
        q_rank, kv_rank = config.q_lora_rank, config.kv_lora_rank
        attention_weights = hidden * q_rank + q_rank * heads * key_dim if q_rank else hidden * heads * key_dim
        attention_weights += hidden * (kv_rank + config.qk_pos_emb_head_dim)
        attention_weights += kv_rank * heads * (config.qk_head_dim + value_dim) + heads * value_dim * hidden
    else:
        key_dim = value_dim = config.head_dim
        attention_weights = hidden * config.head_dim * 2 * (heads + config.num_groups)
    # In a mixture of experts, a token passes the router, its experts and the shared one.
    widths, router = [config.ffn_size] * config.num_layers, 0
    if (moe := config.moe) is not None:
        for layer in config.layers_with_experts:
            widths[layer] = moe.router_topk * moe.ffn_hidden_size + (moe.shared_expert_size or 0)
        router = hidden * (sum(config.experts_of_layers) + moe.shared_expert_gate * len(config.layers_with_experts))
    mlp_weights = (3 if config.activation.is_gated else 2) * hidden * sum(widths)
    weights = config.num_layers * attention_weights + mlp_weights + router + hidden * config.vocab_size
    attended = 0.0  # tokens, on average, over all layers
    for layer in range(config.num_layers):
        window = (config.window_of(layer) or seq_length) + 1
        attended += seq_length / 2 if window >= seq_length else window - window**2 / (2 * seq_length)
    # Scores and their product with the values: each 2 * width * attended forward, and twice that backward.
    attention = 6 * heads * (key_dim + value_dim) * attended
    return float(6 * weights + attention)


def activations(config: DecoderConfig, itemsize: int) -> BlockActivations:
    """Count what autograd keeps of a block; ``itemsize``: bytes of an element. GPT with dropout: 34 S B H in 16 bit."""
    hidden, head_dim, groups = config.hidden_size, config.head_dim, config.num_groups
    latents = 0
    if config.multi_latent_attention:  # q, k, and v padded to their width; and the latent vectors
        head_dim, groups = config.qk_head_dim + config.qk_pos_emb_head_dim, config.num_attention_heads
        latents = (config.q_lora_rank or 0) + config.kv_lora_rank + config.qk_pos_emb_head_dim
    queries, keys, ffn = config.num_attention_heads * head_dim, groups * head_dim, config.ffn_size
    attention = linear_attention = 2 * queries + 2 * keys + latents  # q, k, v, result
    scores = 0
    if config.changes_scores:  # see ``plain_attention``: keys and values of every head; shares, and these in 16 bit
        attention, linear_attention = 4 * queries + latents, queries + 2 * keys + latents
        scores_kept = 4 + (itemsize if itemsize < 4 else 0) + 4 * (config.attn_logit_softcapping is not None)
        scores = config.num_attention_heads * scores_kept + 1  # + 1 for the mask
    before_norms = 0
    if config.qk_layernorm:
        before_norms = latents if config.multi_latent_attention else queries + keys
    before_norms += hidden * (config.post_self_attn_layernorm + config.post_mlp_layernorm)
    # Vectors of the MLP's width: outputs of linear layers, and all that is kept. GELU keeps its input, fc2 its own.
    # SwiGLU keeps gate, up, SiLU of the gate, and the product.
    outputs, kept = (2, 4) if config.activation.is_gated else (1, 2)
    weighed = 0  # outputs of experts, which are kept to be weighed
    # The largest blocks: the MLPs of a token's experts, their inputs and outputs, and the weighted outputs.
    if (moe := config.moe) is not None:
        ffn = moe.router_topk * moe.ffn_hidden_size + (moe.shared_expert_size or 0)
        rows = 3 * moe.router_topk * hidden + 2 * hidden * (itemsize < 4)  # with the router's input in fp32
        before_norms, weighed = before_norms + rows, moe.router_topk * hidden
    modules = {"core_attn": 2 * (queries - keys) * config.changes_scores, "mlp": kept * ffn}
    if moe is not None:
        shared = kept * (moe.shared_expert_size or 0)
        modules |= {"mlp": 0, "moe": kept * ffn + rows, "shared_experts": shared}
    masks = 2 * hidden if config.hidden_dropout > 0 else 0  # a byte each
    return BlockActivations(
        everything=itemsize * (4 * hidden + attention + before_norms + kept * ffn) + masks,
        linear_layers=itemsize * (3 * hidden + linear_attention + outputs * ffn + weighed),
        input=itemsize * hidden,
        keys_and_values=itemsize * 2 * keys,
        scores=scores,
        modules={name: itemsize * vectors for name, vectors in modules.items()},
    )
