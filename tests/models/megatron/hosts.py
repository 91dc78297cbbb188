"""A worker that holds one Megatron model after another. A module of its own, because processes import it."""

import ctypes
import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from transformers import AutoConfig

from podium.models.megatron import cpu_backend, parallel
from podium.models.megatron.context import local_positions
from podium.models.megatron.model import build_chunks
from podium.models.megatron.name_map import pieces, staged_pieces
from podium.models.megatron.parallel import MegatronLayout
from podium.models.megatron.weights import export, load
from podium.protocol import Dispatch, Worker, register
from podium.utils.memory_buffer import (
    MegatronMemoryBufferForRollout,
    build_memory_buffer,
    build_memory_reference_from_module,
    get_weight_buffer_meta_from_module,
)
from podium.utils.piece import Piece

Part = tuple[int, list[int], torch.Tensor]
"""Row, positions in the row, and outputs (n, V) there."""


class ModelHost(Worker):
    """Builds models in one layout after another, and runs them."""

    @register(Dispatch.ONE_TO_ALL)
    def build(self, path: str, layout: MegatronLayout, **options: Any) -> None:
        if parallel._current not in (None, layout):
            # First the model: a process group that something still refers to keeps its threads, about fifty a layout.
            self.chunks: Any = None
            gc.collect()
            parallel.destroy()
        self.chunks = build_chunks(AutoConfig.from_pretrained(path), layout, **options)
        load(self.chunks, path)
        self.layout = layout

    @register(Dispatch.ONE_TO_ALL)
    def build_beside(self, path: str, layout: MegatronLayout) -> None:
        """A second model, as another role of the same process builds it."""
        build_chunks(AutoConfig.from_pretrained(path), layout)

    @register(Dispatch.ONE_TO_ALL)
    def gather_stages(self) -> tuple[list[Piece], int]:
        """What this rank holds once the flat memory of every stage has come, and how many messages that took."""
        stage = torch.nn.ModuleList(self.chunks)
        meta = get_weight_buffer_meta_from_module(stage)
        own = build_memory_buffer(meta)
        build_memory_reference_from_module(stage, own)
        group = ps.get_pipeline_model_parallel_group()
        metas: list[Any] = [None] * group.size()
        torch.distributed.all_gather_object(metas, meta, group=group)
        memory = MegatronMemoryBufferForRollout(
            lambda weights: {f"{p.name}{p.starts}": p.tensor for p in staged_pieces(self.chunks[0], weights)}
        )
        memory.initialize_weight_buffer(metas, group.rank(), own)
        memory.build_memory_reference()
        handles = memory.allgather_params(group)
        for _, handle in handles:
            handle.wait()
        found = staged_pieces(self.chunks[0], memory.weight_buffers)
        for piece in found:
            assert memory.named_parameters[f"{piece.name}{piece.starts}"].data_ptr() == piece.tensor.data_ptr()
        result = [Piece(p.name, p.starts, p.stops, p.tensor.clone()) for p in found]
        memory.release()
        return result, len(handles)

    @register(Dispatch.ONE_TO_ALL)
    def outputs(self, rows: list[list[int]], packed: bool, micro: int) -> list[Part]:
        """Logits or values of the rows, where this rank holds them and is the one to tell."""
        own = rows[ps.get_data_parallel_rank() :: ps.get_data_parallel_world_size()]
        numbers = list(range(len(rows)))[ps.get_data_parallel_rank() :: ps.get_data_parallel_world_size()]
        batches = [(numbers[i : i + micro], own[i : i + micro]) for i in range(0, len(own), micro)]
        # Interleaved stages take micro-batches of one shape.
        longest = max(len(row) for row in rows) if self.layout.vpp > 1 else 0
        make = self._packed if packed else self._padded
        made = [make(*batch, longest) for batch in batches]
        results = self._run([inputs for inputs, _ in made])
        if not ps.is_pipeline_last_stage(ignore_virtual=True) or ps.get_tensor_model_parallel_rank() > 0:
            return []
        parts = []
        for (_, places), result in zip(made, results, strict=True):
            parts += [(row, positions, result[index]) for row, positions, index in places]
        return parts

    def _run(self, micro_batches: list[dict[str, Any]]) -> list[torch.Tensor]:
        """(b, s, V) of each micro-batch on the last stage."""

        def step(iterator: Any, chunk: Any) -> Any:
            output = chunk(**next(iterator))

            def collect(out: torch.Tensor, non_loss_data: bool = True) -> torch.Tensor:
                return out if chunk.value_head else gather_from_tensor_model_parallel_region(out)

            return output, collect

        ids = micro_batches[0]["input_ids"]
        for chunk in self.chunks:
            chunk.eval()
        with torch.no_grad():
            return get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(micro_batches) for _ in self.chunks],
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=ids.shape[1] * self.layout.cp,
                micro_batch_size=ids.shape[0],
                forward_only=True,
                collect_non_loss_data=True,
            )

    def _local(self, bounds: list[int]) -> torch.Tensor:
        return local_positions(bounds, ps.get_context_parallel_world_size(), ps.get_context_parallel_rank())

    def _unit(self) -> int:
        """Lengths are multiples of it."""
        return (self.layout.tp if self.layout.sequence_parallel else 1) * (
            2 * self.layout.cp if self.layout.cp > 1 else 1
        )

    def _up(self, length: int) -> int:
        return -(-length // self._unit()) * self._unit()

    def _padded(self, numbers: list[int], rows: list[list[int]], longest: int = 0) -> Any:
        """Every other row padded on the left."""
        width = self._up(max(longest, *(len(row) for row in rows)) + 3)
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
        own = self._local([0, width])
        places = []
        for i, row in enumerate(rows):
            start = 2 if numbers[i] % 2 else 0
            ids[i, start : start + len(row)] = torch.tensor(row)
            mask[i, start : start + len(row)] = True
            here = [j for j, p in enumerate(own.tolist()) if start <= p < start + len(row)]
            places.append((numbers[i], [own[j].item() - start for j in here], (i, here)))
        return {"input_ids": ids[:, own], "position_ids": own.expand(len(rows), -1), "attention_mask": mask}, places

    def _packed(self, numbers: list[int], rows: list[list[int]], longest: int = 0) -> Any:
        bounds = [0]
        for row in rows:
            bounds.append(bounds[-1] + self._up(len(row)))
        if bounds[-1] < (whole := len(rows) * self._up(longest)):
            bounds.append(whole)  # a sequence of padding
        ids, row_of, position = (torch.full((bounds[-1],), -1) for _ in range(3))
        ids[:] = 0
        for i, row in enumerate(rows):
            ids[bounds[i] : bounds[i] + len(row)] = torch.tensor(row)
            row_of[bounds[i] : bounds[i] + len(row)] = i
            position[bounds[i] : bounds[i] + len(row)] = torch.arange(len(row))
        own = self._local(bounds)
        cu = torch.tensor(bounds, dtype=torch.int32)
        longest = int((cu[1:] - cu[:-1]).max())
        params = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        places = []
        for i, number in enumerate(numbers):
            here = (row_of[own] == i).nonzero().flatten().tolist()
            places.append((number, position[own][here].tolist(), (0, here)))
        inputs = {
            "input_ids": ids[own][None], "position_ids": own[None], "attention_mask": None, "packed_seq_params": params
        }  # fmt: skip
        return inputs, places

    @register(Dispatch.ONE_TO_ALL)
    def weights(self, dtype: str = "float32") -> dict[str, torch.Tensor]:

        return {name: tensor.clone() for name, tensor in export(self.chunks, getattr(torch, dtype))}

    @register(Dispatch.ONE_TO_ALL)
    def holders_of_the_real_torch(self) -> list[str]:
        """Modules of megatron-core, once all that engines use is imported."""
        cpu_backend.install()
        for name in ("dist_checkpointing", "distributed", "optimizer", "pipeline_parallel", "transformer.module"):
            importlib.import_module(f"megatron.core.{name}")
        modules = [name for name in sys.modules if name.startswith("megatron.core.")]
        return [name for name in modules if vars(sys.modules[name]).get("torch") is torch]

    @register(Dispatch.ONE_TO_ALL)
    def parameter(self, name: str) -> torch.Tensor:
        """One of the first chunk, under megatron-core's name."""
        return dict(self.chunks[0].named_parameters())[name].detach()

    @register(Dispatch.ONE_TO_ALL)
    def pieces(self) -> list[Piece]:
        return pieces(self.chunks)

    @register(Dispatch.ONE_TO_ALL)
    def writing_pieces_changes_the_model(self) -> bool:
        """Whether the pieces are all of the parameters' memory but what rounds the vocabulary up."""
        for piece in pieces(self.chunks):
            piece.tensor.fill_(7)
        return all(
            (p == 7).all() or "embed" in n or "output" in n for c in self.chunks for n, p in c.named_parameters()
        )

    @register(Dispatch.ONE_TO_ALL)
    def stages(self, tokens: list[int], hidden: list[torch.Tensor]) -> list[dict[str, Any]]:
        """Each chunk of this rank run by itself. A chunk takes hidden states (L, H) unless it embeds the tokens.

        Args:
            hidden: states before each layer, and after the last.
        """
        ids, facts = torch.tensor([tokens]), []
        for chunk in self.chunks:
            layers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
            chunk.set_input_tensor(None if chunk.pre_process else hidden[layers[0]][:, None])
            with torch.no_grad():
                output = chunk(ids, torch.arange(len(tokens))[None], None)
            facts.append(
                {
                    "stage": (ps.get_pipeline_model_parallel_rank(), chunk.vp_stage),
                    "layers": layers,
                    "names": sorted(name for name, _ in chunk.named_parameters() if "layers" not in name),
                    "output": output[0] if chunk.post_process else output[:, 0],
                }
            )
        return facts

    @register(Dispatch.ONE_TO_ALL)
    def gradients(self, rows: list[list[int]], weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of the sum of logits times `weight` (V,), at the rows' tokens, under Hugging Face names. On one rank."""

        (chunk,) = self.chunks
        chunk.train()
        chunk.zero_grad()
        inputs, places = self._padded(list(range(len(rows))), rows)
        output = chunk(**inputs)
        sum((output[index] * weight).sum() for _, _, index in places).backward()
        whole = {name: torch.full_like(tensor, torch.nan) for name, tensor in export(self.chunks, torch.float32)}
        with torch.no_grad():
            for parameter in chunk.parameters():
                parameter.data, parameter.grad = parameter.grad, None
            for piece in pieces(self.chunks):
                box = tuple(slice(*ends) for ends in zip(piece.starts, piece.stops, strict=True))
                whole[piece.name][box] = piece.tensor
        self.chunks = []
        return whole

    @register(Dispatch.ONE_TO_ALL)
    def train_a_step(self) -> list[dict[str, Any]]:
        """Where the parameters of each chunk lie before and after a step of megatron-core's distributed optimizer."""
        options = DistributedDataParallelConfig(use_distributed_optimizer=True)
        before = [_memory(chunk) for chunk in self.chunks]
        old = [[p.clone() for p in chunk.parameters()] for chunk in self.chunks]
        wrapped = [DistributedDataParallel(chunk.config, options, chunk) for chunk in self.chunks]
        config = OptimizerConfig(lr=0.1, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True)
        optimizer = get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)
        for chunk in wrapped:
            for parameter in chunk.parameters():
                parameter.main_grad.fill_(1.0)
        optimizer.step()
        return [
            {
                "before": before[i],
                "after": _memory(chunk),
                "changed": all((a != b).any() for a, b in zip(chunk.parameters(), old[i], strict=True)),
                "pieces are of the buffer": {p.tensor.untyped_storage().data_ptr() for p in pieces([chunk])}
                == {p.untyped_storage().data_ptr() for p in chunk.parameters()},
            }
            for i, chunk in enumerate(self.chunks)
        ]

    @register(Dispatch.ONE_TO_ALL)
    def measure_load(self, path: str, layout: MegatronLayout) -> dict[str, float]:
        """Bytes of this rank's parameters, and by how much its resident memory grew at most."""

        self.chunks = []
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the last model leaves free would be taken first
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
        before = _resident("VmHWM")
        self.chunks = build_chunks(AutoConfig.from_pretrained(path), layout)
        load(self.chunks, path)
        shard = sum(p.nbytes for chunk in self.chunks for p in chunk.parameters())
        return {"shard": shard, "growth": _resident("VmHWM") - before}


def _memory(chunk: torch.nn.Module) -> dict[str, Any]:
    buffers = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    aligned = all(p.storage_offset() * p.element_size() % 16 == 0 for p in chunk.parameters())
    return {"buffers": len(buffers), "aligned": aligned}


def _resident(field: str) -> int:
    """Bytes; VmRSS is what is resident now, VmHWM its peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)
