# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core models with Transformer Engine layers, DDP and Megatron's optimizer, captured by Megatron's own
implementations.

Written against megatron-core 0.19.2: transformer/cuda_graphs.py (TECudaGraphHelper, CudaGraphManager),
full_cuda_graph.py (FullCudaGraphWrapper), pipeline_parallel/schedules.py, distributed/distributed_data_parallel.py,
optimizer/__init__.py.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import nn

WARMUP = 3


def _loss(output: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """Mean token loss. The copy matters: the schedule scales the first tensor in place, a replay overwrites it."""
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}


def _forward_step(iterator, model):
    batch = next(iterator)
    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), _loss


class Trainer:
    """See `stacks`. Needs an initialized process group and CUDA device."""

    def __init__(self, job: dict):
        self.job, self.shape = job, job["shape"]
        self.device = torch.device("cuda", job["local_rank"])
        self.impl = job["impl"]
        parallel = job["parallel"]
        parallel_state.initialize_model_parallel(
            parallel["tensor"],
            parallel["pipeline"],
            virtual_pipeline_model_parallel_size=parallel["virtual"] if parallel["virtual"] > 1 else None,
            expert_model_parallel_size=parallel["expert"],
            create_gloo_process_groups=False,
        )
        replicas = parallel_state.get_data_parallel_world_size()
        # The capture draws its number of microbatches from this calculator
        # (TECudaGraphHelper._get_cuda_graph_input_data).
        init_num_microbatches_calculator(
            job["rank"],
            None,
            self.shape["microbatch"] * self.shape["microbatches"] * replicas,
            self.shape["microbatch"],
            replicas,
        )
        initialize_rng_tracker(use_te_rng_tracker=True)
        model_parallel_cuda_manual_seed(job["seed"])
        self.config = TransformerConfig(
            **job["config"], **job["graph"], params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16
        )
        built = [self._built(chunk, parallel["virtual"]).cuda(self.device) for chunk in range(parallel["virtual"])]
        self.chunks = self._wrapped([Float16Module(self.config, module) for module in built])
        self.model = self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)
        data = job["data_parallel"]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                bf16=True,
                params_dtype=torch.bfloat16,
                clip_grad=1.0,
                use_distributed_optimizer=data["distributed_optimizer"],
                overlap_param_gather=data["overlap_param_gather"],
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        if data["overlap_grad_reduce"]:
            pauses = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = pauses[0] if len(pauses) == 1 else pauses
        self._schedule = get_forward_backward_func()
        self._helper = None
        # Local graphs are created at the end of the first training step (schedules.create_cudagraphs).
        self.warmup_steps = 0 if self.impl == "local" else WARMUP
        self.captures_in_step = self.impl in ("local", "full_iteration")
        if self.impl == "full_iteration":
            from megatron.core.full_cuda_graph import FullCudaGraphWrapper

            options = {}
            if "use_single_mempool" in inspect.signature(FullCudaGraphWrapper.__init__).parameters:
                options["use_single_mempool"] = self.config.cuda_graph_use_single_mempool
            self._schedule = FullCudaGraphWrapper(self._schedule, cuda_graph_warmup_steps=WARMUP, **options)

    def _built(self, chunk: int, chunks: int) -> nn.Module:
        """The part of the model that this rank's pipeline stage holds; with an interleaved schedule its `chunk`th."""
        place = {"ignore_virtual": False, "vp_stage": chunk} if chunks > 1 else {}
        stages = {
            "pre_process": parallel_state.is_pipeline_first_stage(**place),
            "post_process": parallel_state.is_pipeline_last_stage(**place),
            "vocab_size": self.shape["vocabulary"],
            "max_sequence_length": self.shape["sequence"],
            "position_embedding_type": "rope",
        }
        if chunks > 1:
            stages["vp_stage"] = chunk
        pattern = self.job.get("pattern")
        if pattern:
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
            from megatron.core.models.hybrid.hybrid_model import HybridModel

            return HybridModel(self.config, hybrid_stack_spec, hybrid_layer_pattern=pattern, **stages)
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=self.config.num_moe_experts,
            moe_grouped_gemm=self.config.moe_grouped_gemm,
            qk_layernorm=self.config.qk_layernorm,
        )
        return GPTModel(self.config, spec, **stages)

    def _wrapped(self, modules: list[nn.Module]) -> list[DistributedDataParallel]:
        """DDP built on a side stream: built on the default stream, its gradient accumulators make a capture fail with
        906."""
        side = torch.cuda.Stream()
        if self.impl == "full_iteration":
            try:
                from megatron.core.full_cuda_graph import get_shared_capture_stream
            except ImportError:  # before 0.18
                pass
            else:
                side = get_shared_capture_stream()
        if self.job["drill"] == "default-stream":
            side = torch.cuda.default_stream()
        data = self.job["data_parallel"]
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=data["overlap_grad_reduce"],
            use_distributed_optimizer=data["distributed_optimizer"],
            overlap_param_gather=data["overlap_param_gather"],
        )
        current = torch.cuda.current_stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            # Later chunks reduce while earlier ones still compute anyway (training.py of Megatron-LM does the same).
            wrapped = [
                DistributedDataParallel(self.config, config, module, disable_bucketing=number > 0)
                for number, module in enumerate(modules)
            ]
        current.wait_stream(side)
        return wrapped

    def _run(self, batches, forward_only: bool) -> list[torch.Tensor]:
        iterators = [iter(batches) for _ in self.chunks]
        results = self._schedule(
            forward_step_func=_forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=self.shape["sequence"],
            micro_batch_size=self.shape["microbatch"],
            forward_only=forward_only,
        )
        return [result["loss"].clone() for result in results]

    def step(self, batches, on_gradients=None, update=True) -> list[torch.Tensor]:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self._run(batches, forward_only=False)
        if on_gradients:
            on_gradients()
        if update:
            self.optimizer.step()
        return losses

    @torch.no_grad()
    def evaluate(self, batches) -> list[torch.Tensor]:
        self._set_gather_hooks(False, gather=True)
        self.model.eval()
        losses = self._run(batches, forward_only=True)
        self.model.train()
        self._set_gather_hooks(True)
        return losses

    def _set_gather_hooks(self, on: bool, gather: bool = False) -> None:
        """With overlap_param_gather, forward hooks gather the parameters that the optimizer updated. As in training.py
        of Megatron-LM, a capture and an evaluation do without; `gather` fetches what is still missing."""
        for chunk in self.chunks:
            if not chunk.use_forward_hook:
                continue
            if on:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=gather)

    def capture(self) -> None:
        if self.impl != "transformer_engine":
            return
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        self._helper = TECudaGraphHelper(
            model=self.chunks,
            config=self.config,
            seq_length=self.shape["sequence"],
            micro_batch_size=self.shape["microbatch"],
            optimizers=[self.optimizer],
        )
        self._set_gather_hooks(False)
        self._helper.create_cudagraphs()
        self._set_gather_hooks(True)
        if self.chunks[0].use_forward_hook:
            self._helper.cuda_graph_set_manual_hooks()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, p.main_grad) for name, p in self.model.named_parameters() if hasattr(p, "main_grad"))

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        # The distributed optimizer keeps a rank's part of its parameters; of the others the rank has the BF16 copy, which
        # is complete once the pending gather is.
        self._set_gather_hooks(False, gather=True)
        self._set_gather_hooks(True)
        for name, parameter in self.model.named_parameters():
            main = getattr(parameter, "main_param", None)
            yield name, parameter if main is None else main

    def block(self) -> nn.Module:
        layers = [layer for name, layer in self.model.named_modules() if name.endswith("self_attention")]
        return layers[-1]

    def close(self) -> None:
        self._helper = self._schedule = self.model = self.chunks = self.optimizer = None
        self.config.finalize_model_grads_func = self.config.no_sync_func = None
        gc.collect()
        parallel_state.destroy_model_parallel()
