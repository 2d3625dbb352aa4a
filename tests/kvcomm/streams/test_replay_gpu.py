"""The same masks compiled, on a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config

from kvcomm.engines.transformers.replaying import replay
from kvcomm.engines.transformers.streaming import StreamEngine
from kvcomm.streams.mismatch import ROUNDED, mismatch
from kvcomm.streams.replay import policy_loss
from tests.kvcomm.streams import faults
from tests.kvcomm.streams.scenarios import SCENARIOS, written
from tests.models import stream_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(500),
    # What the compiler does to itself, in some versions of torch.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def compiled_here() -> Iterator[None]:
    """In this process: the compiler's own workers outlive a test."""
    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gate_g01_compiled_flex_attention_is_the_generation(dtype: torch.dtype) -> None:
    shape = {"head_dim": 64, "hidden_size": 128}
    model = stream_model("qwen3 sliding", dtype=dtype, **shape).to("cuda")
    flex = stream_model("qwen3 sliding", dtype=dtype, attn_implementation="flex_attention", **shape).to(
        "cuda"
    )
    flex.load_state_dict(model.state_dict())
    writers = written(StreamEngine(model, 800), SCENARIOS)
    rollouts = [writer.rollout for writer in writers.values()]
    with torch.no_grad():
        report = mismatch(replay(flex, rollouts))
        lost = mismatch(replay(flex, [faults.lost(rollout) for rollout in rollouts]))
    assert report.beyond(ROUNDED) == [], str(report)
    assert lost.k3.mean > 20 * report.k3.mean
    gradients = []
    for each in (model, flex):
        replayed = replay(each, rollouts)
        loss = torch.stack([policy_loss(one.log_probs, one.rollout, 1.0) for one in replayed]).sum()
        slopes = torch.autograd.grad(loss, list(each.parameters()))
        gradients.append(torch.cat([slope.flatten().float() for slope in slopes]))
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) < 0.05
