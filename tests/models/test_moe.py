"""Mixtures of experts against formulas; tests/convert/hf/test_compare.py trains them beside transformers'."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_zpp.models.mlp import Activation
from megatron_zpp.models.moe import (
    MoE,
    MoEConfig,
    auxiliary_losses,
    balancing_loss,
    finish_step,
    route,
    sinkhorn,
    z_loss,
)
from tests.collectives import Collectives

HIDDEN, FFN, EXPERTS, TOPK = 16, 24, 6, 2
SWIGLU = Activation("silu", is_gated=True)


def moe_of(swiglu: bool = True, **options: object) -> MoE:
    config = MoEConfig(EXPERTS, FFN, router_topk=TOPK, **options)
    moe = MoE(config, HIDDEN, SWIGLU if swiglu else Activation(), shared_expert=None)
    generator = torch.Generator().manual_seed(1)
    for parameter in moe.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return moe


def tokens_of(seed: int = 0) -> Tensor:
    return torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def test_a_full_expert_drops_the_tokens_that_weigh_least():
    moe, x = moe_of(expert_capacity_factor=0.5), tokens_of()
    dropless, _ = moe_of()(x)
    y, routed = moe(x)
    capacity = math.ceil(0.5 * 14 * TOPK / EXPERTS)
    assert routed.dropped == (routed.load - capacity).clamp(min=0).sum() > 0
    routing = route(F.linear(x.flatten(0, 1), moe.router.weight), moe.config)
    full = [e for e in range(EXPERTS) if routed.load[e] > capacity]
    lost = torch.zeros(14, dtype=torch.bool)  # tokens that some expert dropped
    for e in full:
        tokens, places = torch.where(routing.experts == e)
        lost[tokens[routing.weights[tokens, places].argsort(descending=True)[capacity:]]] = True
    same = y.isclose(dropless, rtol=1e-4, atol=1e-5).all(-1).flatten()
    assert torch.equal(same, ~lost)


def test_losses_by_their_formulas():
    torch.testing.assert_close(z_loss(torch.zeros(3, 4)), torch.tensor(math.log(4) ** 2))
    moe = moe_of(aux_loss_coeff=0.5, z_loss_coeff=0.25)
    x = tokens_of()
    _, routed = moe(x)
    logits = F.linear(x.flatten(0, 1), moe.router.weight)
    routing = route(logits, moe.config)
    torch.testing.assert_close(routed.balancing_loss, 0.5 * balancing_loss(routing.scores, routing.load))
    torch.testing.assert_close(routed.z_loss, 0.25 * z_loss(logits))
    probabilities = logits.softmax(-1)
    torch.testing.assert_close(routed.entropy, -(probabilities * probabilities.log()).sum(-1).mean())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"router_topk": 7}, "a token goes to 1 to 6 experts"),
        ({"score_function": "tanh"}, "score_function must be one of softmax, sigmoid"),
        ({"score_function": "sigmoid", "router_pre_softmax": True}, "router_pre_softmax requires score_function"),
        ({"expert_capacity_factor": 0.0}, "must be above 0"),
        ({"load_balancing": "global_aux_loss"}, "choose from aux_loss, seq_aux_loss, all_layers_aux_loss"),
    ],
)
def test_what_cannot_be_built_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(EXPERTS, FFN, **options)


def test_biases_follow_the_load():
    """Against the published rule, written plainly: experts with less than the mean rise, those with more fall."""
    moe = moe_of(score_function="sigmoid", bias_update_rate=0.25)
    with torch.no_grad():
        moe.router.weight[0] *= 0.01  # scores of 1/2 for all tokens: seldom chosen, or never
    x, expected = tokens_of(), torch.zeros(EXPERTS)
    for step in range(12):
        choices = (torch.sigmoid(x.detach().flatten(0, 1) @ moe.router.weight.T) + expected).topk(TOPK).indices
        load = torch.tensor([(choices == e).sum() for e in range(EXPERTS)])
        moe(x)
        finish_step([moe], has_stepped=step != 3, add_up=lambda chosen: None)
        if step != 3:  # a step that was left out
            expected += torch.tensor([0.25 if n < load.sum() / EXPERTS else -0.25 for n in load.tolist()])
        torch.testing.assert_close(moe.expert_bias, expected, rtol=0, atol=0)
        assert not moe.chosen.any()
    moe.eval()
    moe(x)
    assert not moe.chosen.any()  # an evaluation moves nothing


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_routes_as_in_megatron_core(topk):
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    logits = 3 * torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(topk))
    torch.testing.assert_close(sinkhorn(logits), theirs.sinkhorn(logits), rtol=1e-4, atol=1e-8)
    config = MoEConfig(EXPERTS, FFN, router_topk=topk, load_balancing="sinkhorn")
    every = logits.sigmoid() if topk == 1 else logits.softmax(-1)
    for training, chosen in (True, theirs.sinkhorn(logits)), (False, every):
        routing = route(logits, config, training=training)
        assert torch.equal(routing.experts, chosen.topk(topk).indices)
        torch.testing.assert_close(routing.weights, every.gather(-1, routing.experts))
    balanced, greedy = (route(logits + torch.arange(EXPERTS) / 2, config, training=mode) for mode in (True, False))
    assert balanced.load.max() < greedy.load.max()
    assert not sinkhorn(torch.full((4, 2), torch.nan)).isfinite().any()  # and it ends


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss"])
def test_balancing_losses_are_megatrons(kind):
    """Against megatron-core's function, which has samples as further experts; a bias changes the choice alone."""
    theirs = pytest.importorskip("megatron.core.transformer.moe.moe_utils")
    moe = moe_of(score_function="sigmoid", bias_update_rate=0.0, aux_loss_coeff=0.5, load_balancing=kind)
    moe.expert_bias[0] = 9
    x = tokens_of()
    _, routed = moe(x)
    assert routed.load[0] == 14
    # Megatron has [S, B, E]: the sequence first.
    logits = F.linear(x, moe.router.weight).transpose(0, 1).reshape(14, EXPERTS)
    chosen, scores = theirs.compute_routing_scores_for_aux_loss(logits, TOPK, "sigmoid")
    samples = 2 if kind == "seq_aux_loss" else 1
    chosen, scores = (of.reshape(14 // samples, -1) for of in (chosen, scores))
    loss = theirs.switch_load_balancing_loss_func(scores, chosen.sum(0), 14 // samples, TOPK, EXPERTS, 0.5)
    torch.testing.assert_close(routed.balancing_loss, loss / samples)


def test_the_balancing_loss_over_all_layers_is_that_of_transformers():
    """Value and gradient; theirs counts each of a token's choices whole, ours as a share."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    layer = moe_of(aux_loss_coeff=0.5, load_balancing="all_layers_aux_loss")
    inputs = [tokens_of(seed) for seed in (0, 1, 2)]  # three layers with the same weights
    routed = [layer(x)[1] for x in inputs]
    ours = auxiliary_losses(routed, layer.config)["load balancing loss"]
    logits = tuple(F.linear(x.flatten(0, 1), layer.router.weight) for x in inputs)
    theirs = 0.5 / TOPK * modeling.load_balancing_loss_func(logits, EXPERTS, TOPK)
    torch.testing.assert_close(ours, theirs)
    per_layer = sum(each.balancing_loss for each in routed) / 3
    assert (ours - per_layer).abs() > 1e-4  # another loss than the mean over layers
    ours, theirs = (torch.autograd.grad(loss, layer.router.weight) for loss in (ours, theirs))
    torch.testing.assert_close(ours, theirs)


def test_evaluations_may_have_another_capacity_and_experts_a_least_one():
    x = tokens_of()  # 14 tokens of 2 choices each, 6 experts
    with torch.no_grad():
        for options, in_training, in_evaluation in (
            (dict(expert_capacity_factor=0.5), 3, 3),  # 28 / 6 * 0.5, rounded up
            (dict(expert_capacity_factor=0.5, eval_capacity_factor=1.0), 3, 5),
            (dict(expert_capacity_factor=0.5, min_capacity=4), 4, 4),
            (dict(expert_capacity_factor=0.5, eval_capacity_factor=100.0), 3, 28),
        ):
            moe = moe_of(**options)
            for mode, capacity in ((True, in_training), (False, in_evaluation)):
                moe.train(mode)
                _, routed = moe(x)
                kept = routed.load.clamp(max=capacity).sum()
                assert routed.dropped == 28 - kept, (options, mode)


def test_a_residual_expert_is_weighed_against_the_others():
    """y = c0 * experts + c1 * shared, c = softmax of a linear layer: DeepSpeed-MoE's."""
    torch.manual_seed(0)
    shared = torch.nn.Linear(HIDDEN, HIDDEN)
    plain = moe_of()
    moe = MoE(MoEConfig(EXPERTS, FFN, router_topk=TOPK, shared_expert_size=FFN, residual=True), HIDDEN, SWIGLU, shared)
    moe.load_state_dict(plain.state_dict(), strict=False)
    x = tokens_of()
    share = torch.nn.functional.softmax(moe.coefficient(x), dim=-1)
    expected = share[..., 0, None] * plain(x)[0] + share[..., 1, None] * shared(x)
    torch.testing.assert_close(moe(x)[0], expected)
    with pytest.raises(ValueError, match="residual and shared_expert_gate weigh the shared expert"):
        MoEConfig(EXPERTS, FFN, router_topk=TOPK, residual=True)


@pytest.mark.parametrize("options", [{"router_num_groups": 2, "router_group_topk": 1}, {"score_function": "sigmoid"}])
def test_weights_are_numbers_however_unlikely_the_chosen_experts_are(options):
    config = MoEConfig(4, FFN, router_topk=2, **options)
    first = 0.0 if options.get("score_function") is None else -200.0  # the best expert may be outside the best group
    logits = torch.tensor([[first, -500.0, -200.0, -201.0]])
    routing = route(logits, config)
    assert routing.weights.isfinite().all() and routing.scores.isfinite().all()
    if "router_num_groups" in options:
        torch.testing.assert_close(routing.weights.sum(), torch.tensor(1.0))


def test_groups_of_softmax_scores_are_those_of_the_logits():
    """Megatron adds up logits to choose groups; probabilities would choose others."""
    config = MoEConfig(num_experts=8, ffn_hidden_size=8, router_topk=4, router_num_groups=4, router_group_topk=2)
    logits = torch.tensor([[5.0, -9.0, 2.0, 1.0, 1.5, 1.4, -1.0, -1.0]])
    assert set(route(logits, config).experts[0].tolist()) == {2, 3, 4, 5}  # 5 - 9 is less than 2 + 1 and 1.5 + 1.4


GROUPS = dict(load_balancing="seq_aux_loss", router_num_groups=2, router_group_topk=1)


@pytest.mark.parametrize("options", [{}, dict(expert_capacity_factor=1.0), GROUPS])
def test_the_host_waits_for_nothing(options):
    moe = moe_of(**options).bfloat16()
    with Collectives() as recorded:
        out, routed = moe(tokens_of().bfloat16())
        (out.float().square().mean() + routed.balancing_loss + routed.z_loss).backward()
    assert recorded.reads == [] and moe.experts.linear_fc2.weight.grad.count_nonzero() > 0


def test_what_is_dropped_cannot_overflow_an_expert():
    """A token that no expert has room for is computed by none: its overflow would be NaN in a weight's gradient."""
    moe = MoE(MoEConfig(2, FFN, router_topk=1, expert_capacity_factor=1.0), HIDDEN, SWIGLU, shared_expert=None)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        moe.router.weight.copy_(torch.tensor([[1.0], [-1.0]]).expand(2, HIDDEN))
    x = torch.ones(1, 4, HIDDEN)
    x[0, 3] = 1e30  # all want the first expert, which has room for two of the equally wanted
    x.requires_grad_()
    y, routed = moe(x)
    y.sum().backward()
    assert routed.dropped == 2 and all(p.grad.isfinite().all() for p in moe.experts.parameters())
