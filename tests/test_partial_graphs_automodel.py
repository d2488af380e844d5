# SPDX-License-Identifier: Apache-2.0
"""NeMo AutoModel's own models under `from_model_parts`: every scope of `backend.cuda_graph.modules`, the same bits as
eager."""

import copy
import os
from types import SimpleNamespace

import pytest

try:  # before torch loads its own cuDNN libraries, or Transformer Engine may find the wrong ones
    import transformer_engine.pytorch  # noqa: F401
except (ImportError, OSError):
    pass
import torch
from partial_graphs import CaptureError, PartialCudaGraphManager
from test_partial_graphs_replay import assert_same
from torch import nn

pytestmark = pytest.mark.gpu

EXPERTS, SEQUENCE, VOCABULARY = 8, 128, 97


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Kernels that give the same bits twice, so that a difference is ours. Transformer Engine asks torch."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    previous = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(previous)


def qwen(scopes):
    """AutoModel's Qwen3-MoE, two layers of width 128, bf16."""
    pytest.importorskip("nemo_automodel")
    pytest.importorskip("transformer_engine")
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.qwen3_moe.model import Qwen3MoeForCausalLM
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

    config = Qwen3MoeConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, moe_intermediate_size=128,
                            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
                            num_experts=EXPERTS, num_experts_per_tok=2, attention_dropout=0.0,
                            max_position_embeddings=128, dtype=torch.bfloat16)
    backend = BackendConfig(attn="te", linear="torch", rms_norm="torch", rope_fusion=False, experts="torch",
                            dispatcher="torch", cuda_graph={"modules": scopes})
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config, backend=backend).cuda()
    model.initialize_weights(torch.device("cuda"), torch.bfloat16)
    return model.train()


def step(model, seed, microbatches=2):
    """Losses of `microbatches` with accumulated gradients, then of an evaluation."""
    results = []
    for index in range(microbatches):
        data = torch.randint(0, VOCABULARY, (1, SEQUENCE), generator=torch.Generator().manual_seed(10 * seed + index))
        data = data.cuda()
        loss = nn.functional.cross_entropy(model(data).logits.flatten(0, 1).float(), data.flatten())
        loss.backward()
        results.append(loss.detach().clone())
    model.eval()
    with torch.no_grad():
        results.append(model(data).logits)
    model.train()
    return results


class Twins:
    """A model whose scopes are captured and its eager twin, trained alike and compared after every step."""

    def __init__(self, model, run, **options):
        self.run, self.graphed, self.eager = run, model, copy.deepcopy(model)
        self.optimizers = [torch.optim.SGD(one.parameters(), 1e-2) for one in (self.eager, self.graphed)]
        self.manager = PartialCudaGraphManager.from_model_parts([self.graphed], **options)
        self.step(0)
        self.manager.capture()

    def step(self, seed):
        results = []
        for model in (self.eager, self.graphed):
            model.zero_grad()
            results.append(self.run(model, seed))
        assert_same(*results)
        for (name, expected), actual in zip(self.eager.named_parameters(), self.graphed.parameters()):
            assert_same(expected.grad, actual.grad, name)
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("options", [{}, {"share_pool": True}, {"accumulate_in_graph": True, "merge": True}],
                         ids=["default", "one pool", "merged and accumulated"])
@pytest.mark.parametrize("scopes", [["attn"], ["te_dpa"], ["moe_router"], ["attn", "moe_router"],
                                    ["te_dpa", "moe_router"]], ids="+".join)
def test_a_model_of_automodel(scopes, options):
    twins = Twins(qwen(scopes), step, **options)
    with twins.manager:
        captured = twins.manager.stats()["captured"]
        assert [entry.name for entry in twins.manager.entries] == [
            f"qwen3_moe.layers.{layer}.{name}" for layer in (0, 1) for name in (
                {"attn": "attention", "te_dpa": "fused_attention", "moe_router": "moe_router"}[one] for one in scopes)]
        for seed in (1, 2, 3):
            twins.step(seed)
        counts = twins.manager.stats()
        # the recording saw training and evaluation, so nothing is left to the eager path
        assert counts["fallback"] == 0, twins.manager.fallback_reasons()
        assert (counts["captured"], counts["replayed"]) == (captured, 3 * 3 * len(twins.manager.entries))


def test_attention_that_must_not_be_in_a_graph_is_kept_out_of_it(monkeypatch):
    """cuDNN before 9.15.1 and a sequence that is no multiple of 128: its backward would go wrong in a graph."""
    pytest.importorskip("transformer_engine")
    from transformer_engine.pytorch.utils import get_cudnn_version

    if get_cudnn_version() > (9, 15, 0):
        pytest.skip("this cuDNN does not have the fault")
    monkeypatch.setattr("test_partial_graphs_automodel.SEQUENCE", 64)
    with pytest.raises(CaptureError, match="layers.0.fused_attention"):
        Twins(qwen(["te_dpa"]), step)


@pytest.mark.parametrize("scopes", [["attn"], ["te_dpa"], ["moe_router"]], ids="+".join)
def test_a_model_of_automodel_with_activation_checkpointing(scopes):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = qwen(scopes)
    for name, block in list(model.model.layers.named_children()):
        model.model.layers[name] = checkpoint_wrapper(block)
    twins = Twins(model, step, activation_checkpointing=True)
    with twins.manager:
        for seed in (1, 2):
            twins.step(seed)
        counts = twins.manager.stats()
        assert counts["replayed"] > 0 and counts["fallback"] == 0, twins.manager.fallback_reasons()


class Preprocessed(nn.Module):
    """AutoModel's own preparation of HybridEP's routing map where its model has it, without DeepEP around it."""

    def __init__(self, compact):
        super().__init__()
        from nemo_automodel.components.moe.megatron.token_dispatcher import _HybridEPMetadataProcessor

        self.config = SimpleNamespace(model_type="test_moe")
        self.backend = SimpleNamespace(cuda_graph=SimpleNamespace(modules=["moe_preprocess"]))
        block, moe = nn.Module(), nn.Module()
        moe.gate, moe.experts = nn.Linear(32, EXPERTS), nn.Linear(EXPERTS, 32)
        moe.experts.token_dispatcher = SimpleNamespace(hybridep_metadata_processor=_HybridEPMetadataProcessor(
            num_experts=EXPERTS, permute_fusion=True, compact_routing=compact))
        block.mlp = moe
        self.layers = nn.ModuleList([block])

    def forward(self, hidden):
        moe = self.layers[0].mlp
        weights, indices = moe.gate(hidden).softmax(-1).topk(2)
        routing, dense = moe.experts.token_dispatcher.hybridep_metadata_processor(indices, weights)
        return routing, moe.experts(dense)


@pytest.mark.parametrize("compact", [False, True])
def test_the_preprocessing_of_automodels_dispatcher(compact):
    pytest.importorskip("nemo_automodel")
    torch.manual_seed(0)

    def run(model, seed):
        hidden = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).cuda()
        routing, out = model(hidden)
        out.square().mean().backward()
        return routing.clone(), out.detach().clone()

    twins = Twins(Preprocessed(compact).cuda(), run)
    with twins.manager:
        for seed in (1, 2, 3):
            twins.step(seed)
        assert twins.manager.stats() == {"captured": 1, "replayed": 3, "fallback": 0}
