"""The rollout role: a batch of prompts in, a batch of responses out, over whichever engine is configured."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from podium.models.hf import load_pretrained
from podium.models.hf_layout import checkpoint_tensors
from podium.models.lora import LoRA, add_lora
from podium.protocol import (
    DISPATCH_VALID,
    DataProto,
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    make_nd_compute_dispatch_fn,
    register,
)
from podium.utils.device import init_distributed, memory_used
from podium.utils.errors import UserError
from podium.utils.memory_ledger import LEDGER
from podium.utils.out_of_memory import micro_batch_of
from podium.workers.rollout.base import Output, Request, RolloutEngine, SamplingParams
from podium.workers.rollout.open_batch import OpenBatch
from podium.workers.weight_sync.role import Source, SyncRole

ROLLOUT_MESH = "rollout"
"""The mesh of copies of the model."""


class RolloutWorker(SyncRole):
    """Generates with one engine on each rank, or on each group of ``tensor_model_parallel_size`` consecutive ranks.

    Args:
        model_path: Hugging Face directory of the policy.
        config: has ``name``, ``dtype``, ``tensor_model_parallel_size``, ``max_num_seqs``, ``gpu_memory_utilization``,
            ``enforce_eager``.
        max_prompt_length, max_response_length: tokens.
        pad_token_id: fills what a response leaves free.
        stop_token_ids: each ends a response, and belongs to it.
        seed: of the engine.
        lora: with it, the base is read here, once, and the adapter alone arrives with each sync (vllm).
        free_cache: `sleep` will be called.
    """

    def __init__(
        self,
        model_path: str,
        config: Any,
        *,
        max_prompt_length: int,
        max_response_length: int,
        pad_token_id: int,
        stop_token_ids: tuple[int, ...],
        seed: int = 0,
        trust_remote_code: bool = False,
        lora: LoRA | None = None,
        free_cache: bool = False,
    ):
        super().__init__()
        self._model_path, self._config = model_path, config
        self._max_prompt_length, self._max_response_length = max_prompt_length, max_response_length
        self._pad, self._stop = pad_token_id, stop_token_ids
        self._seed, self._trust_remote_code, self._lora = seed, trust_remote_code, lora
        self._free_cache = free_cache

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Builds the engine; its weights arrive with the first sync."""
        init_distributed()
        # Ranks that share a copy of the model get the same requests, and one of them answers.
        copy, place = divmod(self.rank, self._config.tensor_model_parallel_size)
        self.register_mesh(ROLLOUT_MESH, copy, place == 0)
        self.engine = self._build()
        self._batches = 0
        self._open: OpenBatch | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_own_weights(self) -> None:
        """Takes the weights at the model's path, as version 0: generation without a trainer."""
        self.engine.update_weights(0, checkpoint_tensors(self._load_own()))

    def _load_own(self) -> torch.nn.Module:
        return load_pretrained(
            AutoModelForCausalLM,
            self._model_path,
            getattr(torch, self._config.dtype),
            gradient_checkpointing=False,
            trust_remote_code=self._trust_remote_code,
        )

    def _build(self) -> RolloutEngine:
        if self._config.name == "vllm":
            return self._build_vllm()
        if self._config.name == "hf":
            from podium.workers.rollout.hf import HFRollout

            return HFRollout(
                self._model_path,
                dtype=self._config.dtype,
                max_num_seqs=self._config.max_num_seqs,
                trust_remote_code=self._trust_remote_code,
            )
        raise UserError(f"actor_rollout_ref.rollout.name={self._config.name}: expected vllm or hf")

    def _build_vllm(self) -> RolloutEngine:
        from podium.workers.rollout.vllm import VLLMRollout

        build = partial(
            VLLMRollout,
            self._model_path,
            dtype=self._config.dtype,
            max_model_len=self._max_prompt_length + self._max_response_length,
            max_num_seqs=self._config.max_num_seqs,
            tensor_parallel_size=self._config.tensor_model_parallel_size,
            gpu_memory_utilization=self._config.gpu_memory_utilization,
            enforce_eager=self._config.enforce_eager,
            free_cache=self._free_cache,
            seed=self._seed,
            trust_remote_code=self._trust_remote_code,
        )
        if self._lora is None:
            return build()
        model = self._load_own()
        base = list(checkpoint_tensors(model))
        adapter = add_lora(model, model, self._lora)
        engine = build(lora=replace(self._lora, targets=tuple(adapter.layers)))
        with TemporaryDirectory() as folder:
            adapter.save(Path(folder), dict(adapter.parameters()), self._model_path)
            engine.serve_adapter(base, folder)
        return engine

    def _sync_ends(self) -> tuple[str, Source | None, RolloutEngine | None]:
        return "rollout", None, self.engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, keep_weights: bool) -> int:
        """Lets the engine sleep until it is needed again, see `RolloutEngine.sleep`; the bytes that it freed."""
        return self.engine.sleep(keep_weights=keep_weights)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def memory_used(self) -> dict[str, float]:
        """Of this process (`podium.utils.device.memory_used`), and the peaks of each method since the last time."""
        return memory_used() | LEDGER.pop(self.role)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(ROLLOUT_MESH))
    def generate_sequences(self, data: DataProto) -> DataProto:
        """One response for each row.

        Args:
            data: ``prompts``, ``prompt_mask`` (B, P) and ``seeds`` (B,); ``meta_info["sampling"]`` with temperature,
                top_p, top_k, and ``meta_info["min_version"]``, the oldest weights that may answer.

        Returns:
            ``responses``, ``response_mask``, ``rollout_log_probs`` (B, R), ``input_ids``, ``attention_mask``,
            ``position_ids`` (B, P + R), ``weight_versions`` (B, 2), the oldest and the newest that a response has
            tokens of; ``meta_info["eos_token_id"]``, the tokens that end a response.

        Raises:
            StaleWeightsError: the engine holds older weights.
        """
        assert data.batch is not None
        prompts, prompt_mask = data.batch["prompts"], data.batch["prompt_mask"].bool()
        requests = self._requests(data)
        with micro_batch_of(partial(_size, requests, self._config.max_num_seqs)):
            outputs = self.engine.generate(requests, data.meta_info["min_version"])
        return self._assemble(prompts, prompt_mask, [outputs[request.request_id] for request in requests])

    @register(dispatch_mode=make_nd_compute_dispatch_fn(ROLLOUT_MESH))
    def begin_sequences(self, data: DataProto) -> None:
        """Takes a batch in, whose responses `finished_sequences` gives; what was left of the last is given up.

        Args:
            data: as for `generate_sequences`, and ``rows`` (B,), numbers by which the driver knows them again.

        Raises:
            StaleWeightsError: the engine holds older weights.
        """
        if self._open is not None:
            self._open.abort()
        assert data.batch is not None
        if DISPATCH_VALID in data.batch:
            data = data.select_idxs(data.batch[DISPATCH_VALID])
        requests = self._requests(data)
        self._open, self._begun = OpenBatch(self.engine, requests, data.meta_info["min_version"]), data
        self._begun_size = partial(_size, requests, self._config.max_num_seqs)

    @register(dispatch_mode=make_nd_compute_dispatch_fn(ROLLOUT_MESH))
    def finished_sequences(self, steps: int) -> tuple[DataProto | None, int]:
        """Takes at most so many steps, a token a response each.

        Returns:
            The responses that have finished, as of `generate_sequences`, with their ``rows``, if there are any; and how
            many are left.
        """
        if self._open is None:  # a process that was started anew has nothing left
            return None, 0
        with micro_batch_of(self._begun_size):
            finished = self._open.advance(steps)
        if not finished:
            return None, self._open.unfinished
        assert self._begun.batch is not None
        begun = self._begun.batch[torch.tensor(list(finished))]
        part = self._assemble(begun["prompts"], begun["prompt_mask"].bool(), list(finished.values()))
        return part.union(DataProto.from_dict({"rows": begun["rows"]})), self._open.unfinished

    def _requests(self, data: DataProto) -> list[Request]:
        assert data.batch is not None
        prompts, prompt_mask = data.batch["prompts"], data.batch["prompt_mask"].bool()
        self._batches += 1
        return [
            Request(
                f"{self._batches}-{row}",
                tuple(ids[mask].tolist()),
                SamplingParams(
                    max_tokens=self._max_response_length,
                    seed=int(seed),
                    stop_token_ids=self._stop,
                    **data.meta_info["sampling"],
                ),
            )
            for row, (ids, mask, seed) in enumerate(zip(prompts, prompt_mask, data.batch["seeds"], strict=True))
        ]

    def _assemble(self, prompts: torch.Tensor, prompt_mask: torch.Tensor, outputs: list[Output]) -> DataProto:
        rows, width = len(outputs), self._max_response_length
        responses = torch.full((rows, width), self._pad, dtype=torch.int64)
        response_mask = torch.zeros(rows, width, dtype=torch.bool)
        log_probs = torch.zeros(rows, width)
        versions = [(min(output.weight_versions), max(output.weight_versions)) for output in outputs]
        for row, output in enumerate(outputs):
            count = len(output.token_ids)
            responses[row, :count] = torch.tensor(output.token_ids, dtype=torch.int64)
            response_mask[row, :count] = True
            log_probs[row, :count] = torch.tensor(output.log_probs)
        attention_mask = torch.cat([prompt_mask, response_mask], dim=1)
        return DataProto.from_dict(
            {
                "responses": responses,
                "response_mask": response_mask,
                "rollout_log_probs": log_probs,
                "weight_versions": torch.tensor(versions),
                "input_ids": torch.cat([prompts, responses], dim=1),
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0),
            },
            meta_info={"eos_token_id": list(self._stop)},
        )


def _size(requests: list[Request], most: int) -> tuple[int, int, int]:
    """Rows that are decoded together, their tokens and longest row at the end: at most that is in memory."""
    lengths = sorted((len(r.prompt_ids) + r.sampling.max_tokens for r in requests), reverse=True)[:most]
    return len(lengths), sum(lengths), lengths[0]
