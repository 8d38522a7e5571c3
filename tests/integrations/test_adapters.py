"""What the adapters do that no run on CPUs shows."""

from types import SimpleNamespace

import pytest

from megatron_zpp.zeropp import ZeroPPConfig

pytestmark = pytest.mark.integrations


def test_the_trainers_callback_follows_the_loss_scale():
    """The Trainer has a GradScaler on GPUs alone; a scale that falls is a step that was skipped."""
    from megatron_zpp.integrations.huggingface import ZeroPPCallback

    callback, calls = ZeroPPCallback(ZeroPPConfig()), []
    callback.zeropp = SimpleNamespace(undo_step=lambda: calls.append("undo"), rescale_errors=calls.append)
    before = 2048.0
    for scale in (1024.0, 1024.0, 512.0, 512.0, 1024.0):
        for when, now in ((callback.on_step_begin, before), (callback.on_optimizer_step, scale)):
            when(None, None, None, optimizer=SimpleNamespace(scaler=SimpleNamespace(get_scale=lambda now=now: now)))
        before = scale
    assert calls == ["undo", 0.5, 1.0, "undo", 0.5, 1.0, 2.0]


@pytest.fixture
def llama():
    """Return torchtitan's configuration of a small Llama."""
    from examples.library.on_cpus import let_torchtitan_train_on_cpus

    let_torchtitan_train_on_cpus()
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return llama3_debugmodel()


def test_torchtitans_defaults_that_cannot_be_are_refused_by_name(llama):
    from megatron_zpp.integrations.torchtitan import with_zeropp

    config = with_zeropp(llama, ZeroPPConfig())
    assert config.training.disable_cuda_graphs
    assert not llama.training.disable_cuda_graphs  # the given configuration stays as it was
    config.parallelism.pipeline_parallel_degree = 2  # with its own loss, which is chunked
    with pytest.raises(ValueError, match=r"config\.loss = config\.loss\.loss_fn"):
        config.build()
    config.training.disable_cuda_graphs = False
    with pytest.raises(ValueError, match=r"--training\.disable_cuda_graphs"):
        config.build()


def test_torchtitans_command_line_has_the_settings_of_zeropp(llama):
    import tyro

    from megatron_zpp.integrations.torchtitan import ZeroPPTrainer, with_zeropp

    default = with_zeropp(llama, ZeroPPConfig(quantized_gradients=True))
    words = ["--zeropp.hpz-partition-size", "8", "--zeropp.gradient-bits", "2"]
    parsed = tyro.cli(ZeroPPTrainer.Config, args=words, default=default)
    assert parsed.zeropp == ZeroPPConfig(quantized_gradients=True, hpz_partition_size=8, gradient_bits=2)
