"""Inference on a GPU: CUDA graphs, compiled parts, and the sparse FFN for few tokens and for many."""

import pytest
import torch

import twell
from kernels.reference import ffn_forward
from kernels.synthetic import FiringLaw, Problem
from tests.twell.small import N_VOCAB, build
from twell.decoder import Decoder
from twell.forced import force_firing
from twell.greedy_check import compare_greedy
from twell.inference import Engine
from twell.model import Transformer
from twell.relu_ffn import ReluFFN, settle
from twell.sampling import GREEDY, Sampling

KINDS = ["dense_silu", "dense_relu", "sparse", "sparse_nongated"]
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8, 9], [7, 9, 3, 2]]
HOT = Sampling(2.0, 40, 0.95)


def model(kind: str = "sparse", dtype: torch.dtype = torch.float32, **changes) -> Transformer:
    return build(kind, dtype=dtype, seq_len=600, **changes).cuda()


def close(y: torch.Tensor, expected: torch.Tensor) -> bool:
    return ((y.float() - expected.float()).norm() <= 0.02 * expected.float().norm()).item()


@pytest.mark.parametrize("sampling", [GREEDY, HOT, Sampling(2.0, None, None), Sampling(2.0, None, 0.9)])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_write_what_the_host_would_launch(kind, sampling):
    texts = [
        Engine(model(kind), 3, graph=graph).generate(PROMPTS, 40, sampling, range(5), stop={7})
        for graph in (True, False)
    ]
    assert texts[0] == texts[1] and max(map(len, texts[0])) > 3


def test_graphs_for_every_number_of_slots():
    """Attention that grows over 256 and 512 slots, and a row that goes on from its last half."""
    texts = [Engine(model(), 2, graph=graph).generate(PROMPTS[:3], 640, GREEDY, range(3)) for graph in (True, False)]
    assert texts[0] == texts[1] and [len(text) for text in texts[0]] == [640] * 3


@torch.no_grad()
def test_recomputation():
    it = model("sparse")
    for prompt, answer in zip(PROMPTS, Engine(it, 3).generate(PROMPTS, 20, GREEDY, range(5))):
        ids = list(prompt)
        for _ in range(20):
            ids.append(it(torch.tensor([ids], device="cuda")).logits[0, -1].argmax().item())
        assert ids[len(prompt) :] == answer


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_parts(kind):
    torch._dynamo.reset()
    texts = [
        Engine(model(kind), 3, compile=compile).generate(PROMPTS, 20, HOT, range(5), stop={7})
        for compile in (True, False)
    ]
    assert texts[0] == texts[1]


def test_devices_draw_the_same_tokens():
    on_gpu = Engine(model(), 3).generate(PROMPTS, 20, HOT, range(5))
    assert on_gpu == Engine(build(seq_len=600), 3).generate(PROMPTS, 20, HOT, range(5))


@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_text_in_bf16_is_the_dense_one_up_to_ties(rows):
    shape = {"d_model": 512, "n_heads": 8, "n_kv_heads": 4, "d_ff": 1408}
    it = model(dtype=torch.bfloat16, **shape).to(torch.bfloat16)
    force_firing(it, 20, torch.randint(N_VOCAB, (4, 128), device="cuda"))
    dense, sparse = Engine(it, rows, impl="torch"), Engine(it, rows)
    assert sparse.decoder.shape.sparse and not dense.decoder.shape.sparse
    for comparison in compare_greedy(dense, sparse, PROMPTS[:rows], 256):
        assert not comparison.differs or comparison.tie, comparison


@pytest.mark.parametrize("n", [1, 64, 65, 5000])
@torch.no_grad()
def test_the_ffn_learns_and_stays_exact(n):
    """Dense at first; then as predicted; then repeated, when tokens fire more than ever before."""
    problem = Problem(FiringLaw(15), 2048, 5632, device="cuda")
    layer = ReluFFN(*problem.weights, "auto")
    layer.state.captured = True  # or a host that is slow to launch kernels would keep it dense
    for number in range(3):
        x = problem.batch(n, number)[0]
        y = layer(x)
        while settle([layer]):
            y = layer(x)
        assert close(y, ffn_forward(x, *problem.weights).y)
    x[:, 1] += 2.0  # of the deviation of a pre-activation
    y = layer(x)
    while settle([layer]):
        y = layer(x)
    assert close(y, ffn_forward(x, *problem.weights).y)
    if n == 5000:
        shape, device = layer.state.shape, x.device
        assert layer.state.decision.runs_sparse(shape, False, device, x.dtype, captured=True)


def test_a_step_does_not_wait_for_the_device():
    engine = Engine(model("sparse"), 3, graph=False)
    engine.generate(PROMPTS, 3, HOT, range(5))
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.stepper(256, HOT)()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
def test_sparsified_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=512, intermediate_size=1408, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, hidden_act="relu", max_position_embeddings=512,
    )  # fmt: skip
    it = transformers.LlamaForCausalLM(config).eval().to("cuda", torch.bfloat16)
    inputs = [torch.randint(61, shape, device="cuda") for shape in ((1, 1), (2, 20), (4, 200))]
    expected = [it(ids).logits for ids in inputs]
    twell.sparsify(it)
    for ids, logits in zip(inputs, expected):
        assert close(it(ids).logits, logits)
    assert it.generate(inputs[1], max_new_tokens=8, do_sample=False, pad_token_id=0).shape == (2, 28)


def test_more_rows_than_the_kernel_takes():
    it = model("sparse", dtype=torch.bfloat16)
    assert not Decoder(it, "auto", max_rows=65).shape.sparse
    texts = Engine(it, 65).generate([[1 + i % 50] for i in range(70)], 12, HOT, range(70))
    assert len(texts) == 70 and all(len(text) == 12 for text in texts)
