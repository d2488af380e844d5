# SPDX-License-Identifier: Apache-2.0
"""Real CUDA graphs: the same bits as eager, memory that comes back, replays that really are graph launches."""

import copy
import gc
import io
import os

import pytest

try:  # before torch loads its own cuDNN libraries, or Transformer Engine may find the wrong ones
    import transformer_engine.pytorch  # noqa: F401
except (ImportError, OSError):
    pass
import torch
from cudagraphs.partial.backends import CudaBackend
from partial_graphs import PartialCudaGraphManager, PartialGraphEntry
from test_partial_graphs_chain import gradients as auxiliary_gradients
from test_partial_graphs_copies import Layers, assert_equal_training, expanded_step
from test_partial_graphs_replay import Block, Model, Repeats, assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.gpu

MODES = pytest.mark.parametrize("mode", [{}, {"accumulate_in_graph": True}, {"merge": True},
                                         {"merge": True, "accumulate_in_graph": True}, {"share_pool": True},
                                         {"share_pool": True, "merge": True, "accumulate_in_graph": True}],
                                ids=["default", "accumulate", "merge", "both", "one pool", "one pool and both"])


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    """Kernels that give the same bits twice, so that a difference is ours."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    previous = torch.are_deterministic_algorithms_enabled()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(previous)


def tokens(seed, batch=2):
    return torch.randint(0, 11, (batch, 16), generator=torch.Generator().manual_seed(seed)).cuda()


def train(model, seed=0, microbatches=1, batch=2):
    losses = []
    for index in range(microbatches):
        data = tokens(seed * 10 + index, batch)
        loss = nn.functional.cross_entropy(model(data).flatten(0, 1).float(), data.flatten())
        loss.backward()
        losses.append(loss.detach().clone())
    return losses


class Pair:
    """A captured model and its eager twin with one optimizer each, driven by the same function."""

    def __init__(self, model, select, record, **options):
        torch.manual_seed(1)
        self.graphed, self.eager = model.cuda(), copy.deepcopy(model).cuda()
        self.optimizers = {id(one): torch.optim.AdamW(one.parameters(), 1e-3) for one in (self.graphed, self.eager)}
        self.manager = PartialCudaGraphManager.from_modules(self.graphed, select, **options)
        self.step(record)
        self.manager.capture()

    def step(self, run, seed=3):
        results = []
        for model in (self.eager, self.graphed):
            torch.manual_seed(seed)
            model.zero_grad()
            results.append(run(model))
        assert_same(*results)
        for (name, expected), actual in zip(self.eager.named_parameters(), self.graphed.parameters()):
            assert_same(expected.grad, actual.grad, name)
        assert_same(list(self.eager.buffers()), list(self.graphed.buffers()))
        for optimizer in self.optimizers.values():
            optimizer.step()
        return results[1]


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_training_equals_eager(mode, dtype, microbatches):
    pair = Pair(Model(4, width=64).to(dtype), "layers.*", lambda model: train(model, 0, microbatches), **mode)
    with pair.manager:
        for seed in range(1, 5):
            pair.step(lambda model, seed=seed: train(model, seed, microbatches), seed)
        assert pair.manager.stats() == {"captured": 4, "replayed": 16 * microbatches, "fallback": 0}


@MODES
def test_random_numbers_advance_as_in_eager(mode):
    pair = Pair(Model(3, dropout=0.3, width=64), "layers.*", train, **mode)
    with pair.manager:
        results = [pair.step(lambda model: train(model, 1, 2), seed)[0] for seed in (5, 6)]
        assert not torch.equal(*results)
        assert pair.manager.stats()["fallback"] == 0


@MODES
def test_microbatches_in_flight_and_beyond_the_bound(mode):
    def pipelined(count):
        def run(model):
            outputs = [model(tokens(seed)) for seed in range(count)]
            for output in outputs:
                output.float().square().mean().backward()
        return run

    pair = Pair(Model(3, width=64), "layers.*", pipelined(2), **mode)
    with pair.manager:
        for count in (2, 3, 1, 2):
            pair.step(pipelined(count))
        assert pair.manager.stats() == {"captured": 3, "replayed": 21, "fallback": 3}


@MODES
def test_a_one_forward_one_backward_schedule(mode):
    """Earlier graphs are replayed while results of later ones are still needed."""
    def schedule(model):
        waiting = [model(tokens(seed)) for seed in range(2)]
        for seed in range(2, 7):
            waiting.pop(0).float().square().mean().backward()
            waiting.append(model(tokens(seed)))
        for output in waiting:
            output.float().square().mean().backward()

    pair = Pair(Model(4, width=64), "layers.*", schedule, **mode)
    with pair.manager:
        for _ in range(3):
            pair.step(schedule)
        assert pair.manager.stats() == {"captured": 4, "replayed": 4 * 7 * 3, "fallback": 0}


@pytest.mark.parametrize("share_pool", [False, True])
def test_a_result_of_a_later_entry_survives_replays_of_earlier_ones(share_pool):
    kept = {}

    def run(model):
        x = model.embed(tokens(1))
        for layer in model.layers:
            x = layer(x)
        if id(model) not in kept:
            kept[id(model)] = x.detach()
        return [kept[id(model)]]

    pair = Pair(Model(4, width=64), "layers.*", lambda model: (run(model), kept.clear())[1],
                share_pool=share_pool)
    with pair.manager:
        for _ in range(3):
            pair.step(run)


@pytest.mark.parametrize("share_pool", [False, True])
def test_outputs_that_the_caller_keeps_and_repeated_modules(share_pool):
    kept = {}

    def run(model):
        x = model.embed(tokens(len(kept.setdefault(id(model), []))))
        for _ in range(3):
            x = model.block(x)
            kept[id(model)].append(x.detach()[0, 3:5])
        x.float().square().mean().backward()
        return kept[id(model)]

    model = Repeats(3)
    model.embed, model.block = nn.Embedding(11, 64), Block(64)
    pair = Pair(model, "block", run, share_pool=share_pool)
    with pair.manager:
        for _ in range(3):
            pair.step(run)
        assert pair.manager.fallback_reasons()["in flight"] > 0
        kept.clear()
        fallbacks = pair.manager.stats()["fallback"]
        pair.step(lambda model: (run(model), kept.clear())[1])
        assert pair.manager.stats()["fallback"] == fallbacks


def test_autocast_and_evaluation_in_between():
    def run(model):
        with torch.autocast("cuda", torch.bfloat16):
            return train(model, 1, 2)

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            result = model(tokens(9))
        model.train()
        return result

    pair = Pair(Model(3, dropout=0.1, width=64), "layers.*", run)
    with pair.manager:
        for _ in range(2):
            pair.step(run)
            pair.step(evaluate)
        assert pair.manager.stats() == {"captured": 3, "replayed": 12, "fallback": 6}


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    class Checkpointed(Model):
        def forward(self, data):
            x = self.embed(data)
            for layer in self.layers:
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)), x, use_reentrant=reentrant)
            return self.head(x)

    pair = Pair(Checkpointed(3, dropout=0.2, width=64), "layers.*", train)
    with pair.manager:
        for seed in range(3):
            pair.step(lambda model, seed=seed: train(model, seed, 2), seed)
        assert pair.manager.stats()["fallback"] == 0


def test_a_host_synchronisation_is_refused_and_the_process_stays_usable():
    class Syncs(nn.Module):
        def forward(self, x):
            return x * x.max().item()

    model = nn.ModuleList([Syncs(), nn.Linear(8, 8)]).cuda()
    manager = PartialCudaGraphManager.from_modules(model, "*")
    x = torch.ones(4, 8, device="cuda")
    model[1](model[0](x)).sum().backward()
    with manager:
        manager.capture()
        assert "waits for the device on the host" in manager.entries[0].signatures[0].refusal
        model[1](model[0](x)).sum().backward()
        assert manager.stats() == {"captured": 1, "replayed": 1, "fallback": 1}


def test_a_failed_capture_leaves_training_eager_and_right():
    class Breaks(nn.Module):
        armed = False

        def forward(self, x):
            if torch.cuda.is_current_stream_capturing():
                raise ValueError("not in a capture")
            return x + 1

    model = nn.ModuleList([nn.Linear(8, 8), Breaks()]).cuda()
    manager = PartialCudaGraphManager.from_modules(model, "*")
    x = torch.ones(4, 8, device="cuda")
    model[1](model[0](x)).sum().backward()
    with pytest.raises(RuntimeError, match="capture failed for 1: not in a capture"):
        manager.capture()
    assert "forward" not in vars(model[0])
    model[1](model[0](x)).sum().backward()
    torch.cuda.synchronize()
    manager.close()


@MODES
def test_replays_are_graph_launches(mode):
    pair = Pair(Model(4, width=64), "layers.*", train, **mode)
    with pair.manager:
        pair.step(lambda model: train(model, 1))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                                torch.profiler.ProfilerActivity.CUDA]) as profile:
            train(pair.graphed, 2)
            torch.cuda.synchronize()
        launches = sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")
        assert launches == (2 if mode.get("merge") else 8)


def test_close_gives_the_memory_back():
    model = Model(4, width=256).cuda()
    allocated = []
    for _ in range(3):  # the first time also pays for what stays: cuBLAS workspaces of the capture stream
        manager = PartialCudaGraphManager.from_modules(model, "layers.*")
        train(model, batch=32)
        model.zero_grad()
        manager.capture()
        train(model, batch=32)
        model.zero_grad()
        held = torch.cuda.memory_allocated()
        manager.close()
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
        assert held > allocated[-1] + (1 << 20)
    assert allocated[2] == allocated[1]


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=97, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                                      use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def llama_step(model, seed, microbatches=4):
    losses = []
    for index in range(microbatches):
        data = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(seed * 10 + index)).cuda()
        loss = model(input_ids=data, labels=data).loss / microbatches
        loss.backward()
        losses.append(loss.detach().clone())
    return losses


@MODES
def test_transformers_llama_with_accumulation_evaluation_and_checkpoints(mode):
    pair = Pair(llama(), "model.layers.*", lambda model: llama_step(model, 0), **mode)

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            result = model(input_ids=tokens(5)).logits
        model.train()
        return result

    with pair.manager:
        for seed in (1, 2):
            pair.step(lambda model, seed=seed: llama_step(model, seed))
            pair.step(evaluate)
        saved = io.BytesIO()
        torch.save(pair.graphed.state_dict(), saved)
        pair.step(lambda model: llama_step(model, 3))
        for model in (pair.graphed, pair.eager):
            saved.seek(0)
            model.load_state_dict(torch.load(saved))
        pair.step(lambda model: llama_step(model, 4))
        assert pair.manager.stats() == {"captured": 4, "replayed": 4 * 4 * 4, "fallback": 2 * 4}


@pytest.mark.parametrize("reentrant", [False, True])
def test_transformers_llama_with_activation_checkpointing(reentrant):
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    if reentrant:
        model.enable_input_require_grads()
    pair = Pair(model, "model.layers.*.self_attn", lambda model: llama_step(model, 0))
    with pair.manager:
        for seed in (1, 2):
            pair.step(lambda model, seed=seed: llama_step(model, seed))
        counts = pair.manager.stats()
        assert counts["fallback"] == 0 and counts["replayed"] > 0, pair.manager.fallback_reasons()


def test_an_fsdp2_unit_is_captured_with_copied_parameters(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        def run(model):
            x = torch.ones(4, 64, device="cuda")
            for layer in model:
                x = layer(x)
            x.square().mean().backward()
            return x.detach().clone()

        torch.manual_seed(0)
        model = nn.ModuleList(Block(64) for _ in range(3)).cuda()
        eager = copy.deepcopy(model)
        for one in (model, eager):
            for layer in one:
                fully_shard(layer)
        manager = PartialCudaGraphManager.from_modules(model, "*")
        with manager:
            for step in range(4):
                results = []
                for one in (eager, model):
                    one.zero_grad()
                    results.append(run(one))
                assert torch.equal(*results)
                for expected, actual in zip(eager.parameters(), model.parameters()):
                    assert torch.equal(expected.grad.full_tensor(), actual.grad.full_tensor())
                    with torch.no_grad():
                        expected.mul_(0.9)
                        actual.mul_(0.9)
                if step == 0:
                    manager.capture()
            assert manager.entries[0].owner is not None
            assert manager.stats() == {"captured": 3, "replayed": 9, "fallback": 0}, manager.fallback_reasons()
    finally:
        dist.destroy_process_group()


def test_transformer_engine_keeps_fp8_state_and_caches_weights():
    te = pytest.importorskip("transformer_engine.pytorch")
    from cudagraphs.partial.transformer_engine import TransformerEngineBackend
    from transformer_engine.common.recipe import DelayedScaling
    torch.use_deterministic_algorithms(False)
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo="max")
    torch.manual_seed(0)
    model = nn.ModuleList(te.Linear(64, 64, params_dtype=torch.bfloat16) for _ in range(2)).cuda()
    eager = nn.ModuleList(te.Linear(64, 64, params_dtype=torch.bfloat16) for _ in range(2)).cuda()
    eager.load_state_dict(model.state_dict())
    manager = PartialCudaGraphManager(
        [PartialGraphEntry(str(index), layer) for index, layer in enumerate(model)],
        backend=TransformerEngineBackend(recipe=recipe, cache_quantized_params=True))
    manager.start_recording()

    def step(modules, seed):
        losses = []
        for microbatch in range(2):
            x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed * 2 + microbatch)).cuda().bfloat16()
            with te.autocast(enabled=True, recipe=recipe):
                for layer in modules:
                    x = layer(x.requires_grad_() * 1, is_first_microbatch=microbatch == 0)
            x.float().square().mean().backward()
            losses.append(x.detach().float().square().mean())
        return losses

    with manager:
        for seed in range(6):
            results = []
            for modules in (eager, model):
                modules.zero_grad()
                results.append(torch.stack(step(modules, seed)))
            torch.testing.assert_close(*results, rtol=0.05, atol=0.01)
            for expected, actual in zip(eager.parameters(), model.parameters()):
                # A gradient per parameter, not only their norm: FP8 scales differ by the history that warmup leaves.
                torch.testing.assert_close(expected.grad, actual.grad, rtol=0.1, atol=0.02)
            with torch.no_grad():
                for parameter in (*eager.parameters(), *model.parameters()):
                    parameter.sub_(parameter.grad, alpha=0.01)
            if seed == 0:
                manager.capture()
        assert manager.stats() == {"captured": 2, "replayed": 20, "fallback": 0}, manager.fallback_reasons()



@MODES
def test_arguments_and_gradients_that_move_are_read_where_they_are(mode):
    """Many replays in flight, each with arguments and incoming gradients at an address of their own."""
    pair = Pair(Model(2, width=64), "layers.*", lambda model: train(model, 0, 1), **mode)
    kept = []

    def run(model):
        results = []
        for seed in range(12):
            kept.append(torch.empty(1 << (10 + seed), device="cuda"))  # moves what is allocated next
            data = tokens(seed)
            output = model(data)
            results.append(output.detach().clone())
            output.backward(torch.randn_like(output))
        return results

    with pair.manager:
        for seed in range(3):
            pair.step(run, seed)
        assert pair.manager.stats()["fallback"] == 0


def test_the_first_gradients_of_a_step_stay_their_own():
    """They lie where copy nodes put them; neither replays that accumulate nor later steps write there again."""
    torch.manual_seed(1)
    model = Model(2, width=64).cuda()
    with PartialCudaGraphManager.from_modules(model, "layers.*") as manager:
        train(model)
        manager.capture()
        held = []
        for step in range(6):
            model.zero_grad(set_to_none=True)
            train(model, step, 1 + step % 3)
            held += [(parameter.grad, parameter.grad.clone()) for parameter in model.layers.parameters()]
        for gradient, value in held:
            assert torch.equal(gradient, value)


def test_copies_are_part_of_the_graphs():
    """Besides graph launches a step of one entry copies nothing: no argument, no gradient."""
    if not CudaBackend().copy_nodes:
        pytest.skip("this torch or its CUDA bindings have no copy nodes")
    torch.manual_seed(1)
    model = nn.Sequential(Block(64)).cuda()
    with PartialCudaGraphManager.from_modules(model, "*", strict=True) as manager:
        x = torch.randn(2, 16, 64, device="cuda", requires_grad=True)
        gradient = torch.randn(2, 16, 64, device="cuda")
        model(x.view_as(x)).backward(gradient)
        manager.capture()
        for _ in range(2):
            model.zero_grad()
            x.grad = None
            argument = x.view_as(x)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU,
                                                    torch.profiler.ProfilerActivity.CUDA]) as profile:
                model(argument).backward(gradient)
                torch.cuda.synchronize()
        calls = {event.key: event.count for event in profile.key_averages()}
        assert calls.get("cudaGraphLaunch") == 2, calls
        assert not {name for name in calls if name in ("cudaLaunchKernel", "cudaMemcpyAsync", "aten::copy_")}, calls


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("use_auxiliary", [lambda step: True, lambda step: step != 1, lambda step: step == 2],
                         ids=["always", "but once", "once"])
def test_gradients_through_the_second_output_of_a_merged_entry(accumulate, use_auxiliary):
    eager, ours = (auxiliary_gradients(accumulate, graphs, use_auxiliary, CudaBackend, "cuda")
                   for graphs in (False, True))
    for expected, actual in zip(eager, ours):
        assert_same(expected, actual)


@MODES
def test_gradients_that_are_expanded_tensors(mode):
    assert_equal_training(Layers().cuda(), mode, expanded_step, backend=CudaBackend)


@torch.compile
def fused(x, scale):
    return torch.tanh(torch.sin(x) * torch.exp(scale)).square()


class Fused(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = nn.Linear(64, 64), nn.Parameter(torch.rand(64))
        self.function = inner

    def forward(self, x):
        return x + self.function(self.inner(x), self.scale)


def compiled_step(model, seed):
    results = []
    for index in range(2):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * seed + index)).cuda().requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        results += [loss.detach().clone(), x.grad]
    return results


@pytest.mark.parametrize("way, mode", [("function", {}), ("function", {"merge": True, "accumulate_in_graph": True}),
                                       ("function", {"share_pool": True}), ("in place", {}), ("wrapped", {})])
def test_what_torch_compile_made(way, mode):
    """Its backward may write over what the forward saved (donated buffers)."""
    torch.manual_seed(0)
    function = fused if way == "function" else fused._torchdynamo_orig_callable
    graphed = nn.Sequential(*[Fused(function) for _ in range(3)]).cuda()
    eager = copy.deepcopy(graphed)
    for model in (graphed, eager):
        for index, layer in enumerate(model):
            if way == "in place":
                layer.compile()
            elif way == "wrapped":
                model[index] = torch.compile(layer)
    with PartialCudaGraphManager.from_modules(graphed, "*", **mode) as manager:
        for seed in range(4):
            for model in (eager, graphed):
                model.zero_grad()
            assert_same(compiled_step(eager, seed), compiled_step(graphed, seed))
            for expected, actual in zip(eager.parameters(), graphed.parameters()):
                assert_same(expected.grad, actual.grad)
            if seed == 0:
                manager.capture()
        assert manager.stats() == {"captured": 3, "replayed": 3 * 3 * 2, "fallback": 0}


def test_an_output_in_a_variable_of_the_loop_costs_no_replay():
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(64) for _ in range(3)]).cuda()
    with PartialCudaGraphManager.from_modules(model, "*") as manager:
        for step in range(5):
            output = model(torch.full((4, 64), float(step), device="cuda"))
            output.square().mean().backward()
            if step == 0:
                manager.capture()
        assert manager.stats() == {"captured": 3, "replayed": 3 * 4, "fallback": 0}
