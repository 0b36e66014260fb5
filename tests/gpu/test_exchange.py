"""Export, import and evaluation on a GPU, where the models compute in bf16."""

from pathlib import Path

import pytest
import torch

from data.tokenizer import ByteTokenizer
from tests.twell.exchange import byte_set, save_run, some_ids
from twell.evaluate import EvaluateConfig, compute_densely, evaluate
from twell.export import ExportConfig, export
from twell.generate import load_run

pytestmark = pytest.mark.gpu
WIDTHS = {"d_model": 96, "n_heads": 3, "n_kv_heads": 3, "d_ff": 160, "d_ff_nongated": 160}


@pytest.mark.parametrize("kind", ["dense_silu", "sparse", "sparse_nongated"])
@torch.no_grad()
def test_exported_models_agree_to_rounding(tmp_path, kind: str):
    transformers = pytest.importorskip("transformers", reason="needs the extra `export`")
    exact, tokenizer = save_run(tmp_path / "run", kind, **WIDTHS)
    export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf"), dtype="bf16"))
    ours, _, _ = load_run(tmp_path / "run", "latest", torch.device("cuda"))
    compute_densely(ours)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).cuda()
    ids = some_ids(tokenizer.n_vocab)
    expected = exact(ids).logits[..., :257]
    got = ours(ids.cuda()).logits[..., :257].float().cpu()
    rounding = (got - expected).norm()
    assert 0 < rounding < 0.05 * expected.norm()
    assert (theirs(ids.cuda()).logits.float().cpu() - expected).norm() < 2 * rounding


def losses(run: Path, data: Path, device: str) -> dict:
    cfg = EvaluateConfig(run=str(run), data=str(data), tokens=500, device=device)
    (values,) = evaluate(cfg)["validation"].values()
    return values


@pytest.mark.parametrize("kind", ["dense_silu", "sparse", "sparse_nongated"])
def test_losses_are_those_of_the_cpu(tmp_path, kind: str):
    save_run(tmp_path / "run", kind, **WIDTHS)
    data = byte_set(tmp_path)
    on_gpu, on_cpu = (losses(tmp_path / "run", data, device) for device in ("cuda", "cpu"))
    assert on_gpu["tokens"] == on_cpu["tokens"]
    assert on_gpu["val/loss"] == pytest.approx(on_cpu["val/loss"], rel=1e-2)


def test_pruning_calibrates_on_the_gpu(tmp_path):
    save_run(tmp_path / "run", "sparse", **WIDTHS)
    options = {"prune": 400, "data": str(byte_set(tmp_path)), "device": "cuda"}
    assert (
        "FFN width 160 -> "
        in export(ExportConfig(run=str(tmp_path / "run"), out=str(tmp_path / "hf"), **options))["pruned"]
    )


def test_tasks_score_and_generate(tmp_path):
    pytest.importorskip("lm_eval", reason="needs the extra `eval`")
    from tests.twell.test_evaluate import Request
    from twell.evaluate_tasks import TwellLM

    save_run(tmp_path / "run", "sparse", **WIDTHS)
    scores, texts = {}, {}
    for device in ("cpu", "cuda"):
        model, _, _ = load_run(tmp_path / "run", "latest", torch.device(device))
        compute_densely(model)
        lm = TwellLM(model, ByteTokenizer(), batch=2)
        scores[device] = [s for s, _ in lm.loglikelihood([Request(("ab", "cd")), Request(("", "hello"))], True)]
        texts[device] = lm.generate_until([Request((c, {"until": [], "max_gen_toks": 8})) for c in ("ab", "x", "")])
    assert scores["cuda"] == pytest.approx(scores["cpu"], rel=2e-2)
    assert len(texts["cuda"]) == 3 and all(texts["cuda"])
