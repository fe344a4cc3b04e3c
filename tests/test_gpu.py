"""What only a GPU can show; skipped without CUDA. About 3 minutes on one."""
import math

import pytest
import torch
from test_train import TINY, log, run, state, toy  # noqa: F401

import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
GPU = tuple(a for a in TINY if not a.startswith(("--device", "--dtype"))) + ("--device=cuda", "--dropout=0")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_run_in_each_dtype(toy, dtype, capsys):  # noqa: F811
    if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("no bfloat16 on this device")
    assert run(*GPU, f"--dtype={dtype}") == 0
    rows = log()
    assert rows[-1]["val_loss"] < rows[0]["val_loss"] and all(math.isfinite(r.get("loss", 0)) for r in rows)
    assert dtype in capsys.readouterr().out


def test_compiled_equals_eager(toy):  # noqa: F811
    for compile in (True, False):
        assert run(*GPU, "--dtype=float32", f"--compile={compile}", f"--out_dir=c{compile}") == 0
    for a, b in zip(log("cTrue"), log("cFalse"), strict=True):
        assert a == pytest.approx(b, rel=1e-2)


def test_fused_adamw_goes_on_after_a_resume(toy):  # noqa: F811
    assert run(*GPU, "--dtype=float32", "--max_iters=5", "--save_interval=5") == 0
    assert run(*GPU, "--dtype=float32", "--init_from=resume") == 0
    assert all(s["step"].item() == 10 for s in state()["optimizers"][0].values())


def test_flash_attention_is_selected():
    config = train.GPTConfig(256, 1000, 2, 4, 256, 0.0, False)
    model = train.GPT(config).cuda().train()
    idx = torch.randint(0, 1000, (2, 257), device="cuda")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    with torch.autocast("cuda", torch.bfloat16), sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        model(idx[:, :-1], idx[:, 1:]).backward()  # raises where flash attention can't take it


def test_gradient_checkpointing_lowers_the_peak():
    peaks = []
    for again in (False, True):
        model = train.GPT(train.GPTConfig(512, 1000, 8, 8, 512, 0.0, again)).cuda().train()
        idx = torch.randint(0, 1000, (8, 513), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            model(idx[:, :-1], idx[:, 1:]).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] < 0.6 * peaks[0]


def test_mfu_is_reported_where_the_peak_is_known(toy):  # noqa: F811
    import re
    known = any(re.search(rf"\b{k}\b", torch.cuda.get_device_name()) for k in train.PEAK_FLOPS)
    assert run(*GPU) == 0
    assert ("mfu" in (toy / "out/log.jsonl").read_text()) == known
