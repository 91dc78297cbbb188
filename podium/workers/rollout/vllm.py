"""vLLM in this process as a rollout engine: CUDA build and CPU build alike."""

import gc
import logging
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import torch

from podium.models.lora import LoRA
from podium.utils.device import device, is_cuda, preserve_torch_state
from podium.utils.piece import Piece
from podium.workers.rollout.base import NamedTensors, Output, Request, RolloutEngine, SamplingParams
from podium.workers.rollout.vllm_cpu import adapt_cpu_build, repack_experts, resident_bytes
from podium.workers.rollout.vllm_layout import vllm_pieces
from podium.workers.rollout.vllm_lora import adapter_pieces, lora_options


class VLLMRollout(RolloutEngine):
    """An `LLM` engine core driven request by request.

    Args:
        model_path: Hugging Face directory; only its config is read, weights arrive by the first sync.
        dtype: ``float32`` or ``bfloat16``: the precision of generation.
        max_model_len: prompt plus response, in tokens.
        max_num_seqs: most requests decoded together.
        tensor_parallel_size: ranks that share one copy of the model (they must be consecutive in the world).
        gpu_memory_utilization: share of the device's memory for weights and KV cache (CUDA only).
        enforce_eager: no CUDA graphs.
        free_cache: `sleep` will be called: memory is allocated so that it can be given back.
        seed: seeds the engine; requests carry their own seeds.
        lora: of the adapter that `serve_adapter` brings, its targets the full names of the layers.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        max_model_len: int,
        max_num_seqs: int,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.5,
        enforce_eager: bool = True,
        free_cache: bool = False,
        seed: int = 0,
        trust_remote_code: bool = False,
        lora: LoRA | None = None,
    ):
        super().__init__()
        self._lora, self._adapter = lora, None
        with preserve_torch_state(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM's own use of torch
            _prepare_vllm()
            from vllm import LLM

            by_device: dict[str, Any] = (
                {
                    "gpu_memory_utilization": gpu_memory_utilization,
                    "moe_backend": "triton",  # keeps experts as they are loaded: see vllm_layout
                    "enable_sleep_mode": free_cache,
                }
                if is_cuda()
                else {"kv_cache_memory_bytes": _cpu_kv_bytes(model_path, dtype, max_model_len, max_num_seqs)}
            )
            # external_launcher: this process is a rank of an existing torch.distributed world, shared with the trainer.
            launcher = "external_launcher" if torch.distributed.is_initialized() else None
            self._llm = LLM(
                model=model_path,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=dtype,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                tensor_parallel_size=tensor_parallel_size,
                distributed_executor_backend=launcher,
                enforce_eager=enforce_eager or not is_cuda(),
                logprobs_mode="processed_logprobs",
                seed=seed,
                trust_remote_code=trust_remote_code,
                generation_config="vllm",
                **by_device,
                **lora_options(lora),
            )
        self._engine = self._llm.llm_engine
        self._running: dict[str, SamplingParams] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def _enqueue(self, request: Request) -> None:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        if request.request_id in self._running:
            raise ValueError(f"request {request.request_id} is unfinished: ids must differ")
        s = request.sampling
        params = VLLMSamplingParams(
            max_tokens=s.max_tokens,
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=s.top_k,
            seed=s.seed,
            stop_token_ids=list(s.stop_token_ids),
            ignore_eos=True,  # the config's own; a request ends at its own stop tokens only
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": list(request.prompt_ids)}
        self._engine.add_request(request.request_id, prompt, params, lora_request=self._adapter)
        self._running[request.request_id] = s

    def step(self) -> list[Output]:
        if not self._running:
            return []
        with preserve_torch_state():
            results = [result for result in self._engine.step() if result.finished]
        outputs = []
        for result in results:
            done = result.outputs[0]
            outputs.append(self._finish(result.request_id, list(done.token_ids), done.logprobs, done.finish_reason))
        return outputs

    def abort(self, request_ids: Iterable[str]) -> list[Output]:
        # The synchronous engine forgets a request when it aborts it: what it has so far is read before.
        processor = self._engine.output_processor
        outputs = []
        for request_id in (i for i in request_ids if i in self._running):
            [internal_id] = processor.external_req_ids[request_id]
            state = processor.request_states[internal_id]
            tokens = list(state.detokenizer.output_token_ids)
            outputs.append(self._finish(request_id, tokens, list(state.logprobs_processor.logprobs), "abort"))
            self._engine.abort_request([request_id])
        return outputs

    def _finish(self, request_id: str, tokens: list[int], entries: list[Any], reason: str) -> Output:
        log_probs = [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)]
        sampling = self._running.pop(request_id)
        return Output(request_id, tokens, log_probs, reason, sampling, [self.weight_version] * len(tokens))

    def pieces(self) -> list[Piece]:
        if self._adapter is None:
            return vllm_pieces(self._model())
        assert self._lora is not None
        return adapter_pieces(self._model(), self._lora)

    def serve_adapter(self, base: NamedTensors, path: str) -> None:
        """Takes the weights of the base for good, and an adapter; from then on `pieces` are the adapter's alone.

        Args:
            path: directory in peft's format; read here only.
        """
        from vllm.lora.request import LoRARequest

        self.update_weights(0, base)
        self.overwrite()  # the adapter's weights are those of no version yet
        adapter = LoRARequest("policy", 1, path)
        if not self._engine.add_lora(adapter):
            raise RuntimeError(f"vLLM did not take the adapter at {path}")
        self._adapter = adapter

    def _model(self) -> torch.nn.Module:
        [model] = self._llm.apply_model(lambda model: model)
        return model

    def finish_update(self, version: int) -> None:
        repack_experts(self._model())
        super().finish_update(version)

    def drop_caches(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache after a weight update: old keys and values would be reused")

    def _free(self, keep_weights: bool) -> int:
        before = self._resident()
        self._llm.sleep(level=1 if keep_weights else 2)
        return before - self._resident()

    def _take_again(self, what: str) -> None:
        self._llm.wake_up(tags=[what])

    def _resident(self) -> int:
        """Bytes of the device that are in use; on a CPU, of the engine's own tensors."""
        if is_cuda():
            free, total = torch.cuda.mem_get_info(device())
            return total - free
        [nbytes] = self._llm.collective_rpc(resident_bytes)
        return int(nbytes)

    def shutdown(self) -> None:
        self._engine.engine_core.shutdown()
        del self._engine, self._llm
        _free_memory()


def _prepare_vllm() -> None:
    """Settings that must precede vLLM's import, two adaptations of its CPU build, and one to sharing a process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: weights are handed over by reference
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the trainer shares these threads
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # Said before vLLM reads its own level.
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)
    if not is_cuda():
        adapt_cpu_build()
    import vllm.v1.engine.core

    # When an engine is shut down, or merely collected, vLLM destroys the process groups: the default one, which here is
    # the trainer's, and those of every other engine in the process.
    vllm.v1.engine.core.cleanup_dist_env_and_memory = _free_memory


def _free_memory(*args: Any, **kwargs: Any) -> None:
    gc.collect()
    if is_cuda():
        torch.cuda.empty_cache()


def _cpu_kv_bytes(model_path: str, dtype: str, max_model_len: int, max_num_seqs: int) -> int:
    """KV cache that lets `max_num_seqs` full-length requests run together, at most a quarter of the free memory."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(Path(model_path)).get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    itemsize = getattr(torch, dtype).itemsize
    per_token = 2 * config.num_hidden_layers * kv_heads * head_dim * itemsize
    block = 128  # the CPU backend's block size: each request rounds up to it
    needed = max_num_seqs * (-(-max_model_len // block) + 1) * block * per_token
    room = torch.tensor(min(needed, psutil.virtual_memory().available // 4))
    if torch.distributed.is_initialized():
        # Ranks that share a copy must schedule alike.
        torch.distributed.all_reduce(room, op=torch.distributed.ReduceOp.MIN)
    return int(room)
