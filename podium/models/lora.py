"""LoRA (arXiv 2106.09685) on a model's linear layers: a frozen W computes as ``W + (alpha / rank) B A``."""

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from podium.utils.errors import UserError

ALL_LINEAR = "all-linear"
ADAPTER_FOLDER = "lora_adapter"
"""In an export, beside the files of the merged model."""

# Names that peft gives; "default" is the only adapter.
_BASE, _A, _B = ".base_layer.", ".lora_A.default.", ".lora_B.default."
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoRA:
    """What is added to a model."""

    rank: int
    alpha: int
    """The product counts ``alpha / rank`` times, see `scale`."""
    targets: tuple[str, ...] | None = None
    """Names of linear layers, or ends of names; None: all but the head over the vocabulary."""
    seed: int = 0
    """Draws the A of each layer; every B starts at 0."""

    @property
    def scale(self) -> float:
        """Of the product of an adapter's matrices."""
        return self.alpha / self.rank

    @classmethod
    def from_config(cls, model: Any, seed: int, key: str = "model") -> "LoRA | None":
        """From ``lora_rank``, ``lora_alpha`` and ``target_modules``; None where the rank is 0.

        Raises:
            UserError: target_modules is neither "all-linear" nor names.
        """
        if not model.lora_rank:
            return None
        wanted = [model.target_modules] if isinstance(model.target_modules, str) else model.target_modules
        if not isinstance(wanted, list) or not wanted or not all(isinstance(name, str) for name in wanted):
            raise UserError(
                f"{key}.target_modules={wanted}: expected {ALL_LINEAR}, or a list of names of linear layers"
            )
        return cls(model.lora_rank, model.lora_alpha, None if wanted == [ALL_LINEAR] else tuple(wanted), seed)


def check_lora(config: Any, model_config: Any, auto_class: Any, key: str) -> None:
    """Finds out what would otherwise fail in a worker, on a model without weights.

    Args:
        config: the model's own.
        model_config: the section that `LoRA.from_config` reads.
        auto_class: what will load the model, ``AutoModelForCausalLM`` or ``AutoModel``.
        key: of the section, for messages.

    Raises:
        UserError: peft is not installed, or a target does not exist.
    """
    lora = LoRA.from_config(model_config, 0, key)
    if lora is None:
        return
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"{key}.lora_rank={lora.rank}, but peft is not installed: pip install 'podium[lora]'")
    with torch.device("meta"):
        model = auto_class.from_config(config, trust_remote_code=model_config.trust_remote_code)
    find_targets(model, lora.targets, key)


def find_targets(model: Any, wanted: tuple[str, ...] | None, key: str = "model") -> list[str]:
    """Full names of the linear layers of a transformers model that are to be adapted.

    A name stands for every layer that is called so, or whose name ends with it after a dot, as in peft.

    Raises:
        UserError: a name that fits no layer; names those that exist.
    """
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is model.get_input_embeddings().weight
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    if wanted is None:
        return [name for name, layer in layers.items() if layer is not head]
    # A head that is the embedding has no weight of its own to add to.
    free = [name for name, layer in layers.items() if not (is_tied and layer is head)]
    found = []
    for target in wanted:
        mine = [name for name in free if name == target or name.endswith(f".{target}")]
        if not mine:
            there = ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in free))
            raise UserError(
                f"{key}.target_modules has {target}; the linear layers of {type(model).__name__} are {there}"
            )
        found += mine
    return list(dict.fromkeys(found))


def add_lora(module: torch.nn.Module, backbone: Any, lora: LoRA) -> "Adapter":
    """Freezes the backbone and puts adapters into it, in place; what else the module has stays trainable.

    Args:
        module: the whole model: the backbone itself, or what holds it.
        backbone: a transformers model.

    Raises:
        UserError: as `find_targets`.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = find_targets(backbone, lora.targets)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=0.0, bias="none", target_modules=targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lora.seed)  # alike on every rank, which then keeps its shard
        inject_adapter_in_model(config, backbone)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    for parameter in trained.values():
        parameter.data = parameter.data.float()  # small steps: in bfloat16 they would be lost
    return Adapter(module, lora, frozenset(trained))


class Adapter:
    """The adapters of a model, and what becomes of its weights under them.

    Args:
        module: the model, after `add_lora`.
        trained: names of the parameters that are trained: the adapters', and a value head.
    """

    def __init__(self, module: torch.nn.Module, lora: LoRA, trained: frozenset[str]):
        from peft.tuners.lora import LoraLayer

        self.trained = trained
        self._module, self._lora = module, lora
        self._layers: list[Any] = [layer for layer in module.modules() if isinstance(layer, LoraLayer)]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the model computes as its frozen base."""
        # Not by peft's enable_adapters: that also clears requires_grad, of which FSDP keeps copies.
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    @torch.no_grad()
    def merged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a plain model that computes the same, under its names, sharded as the model's own are.

        A collective where they are sharded. The base is never written to, so nothing adds up from call to call.
        """
        parameters = dict(self._module.named_parameters())
        for name, parameter in parameters.items():
            if _A in name or _B in name:
                continue
            b = parameters.get(name.replace(_BASE, _B)) if _BASE in name else None  # a bias has none
            merged = parameter.detach() if b is None else self._merge(parameter, b, parameters[name.replace(_BASE, _A)])
            yield name.replace(_BASE, "."), merged

    def _merge(self, weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """``W + scale B A``, a shard of rows from the same rows of W and B."""
        columns = a.full_tensor() if isinstance(a, DTensor) else a
        rows = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (weight, b)]
        local = torch.addmm(rows[0].float(), rows[1].float(), columns.float(), alpha=self._lora.scale).to(weight.dtype)
        if not isinstance(weight, DTensor):
            return local
        mesh, placements = weight.device_mesh, weight.placements
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride())

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What is trained, by name."""
        return ((name, p.detach()) for name, p in self._module.named_parameters() if name in self.trained)

    @property
    def layers(self) -> list[str]:
        """Names of the layers that are adapted, in the model without adapters."""
        return sorted(name.split(_A)[0] for name in self.trained if _A in name)

    @torch.no_grad()
    def factors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """``LAYER.lora_A.weight`` and ``LAYER.lora_B.weight``, with the scale in B: their product is added to W."""
        for name, parameter in self.parameters():
            if _A in name or _B in name:
                factor = parameter if _A in name else parameter * self._lora.scale
                yield name.replace(".default.", "."), factor

    def save(self, path: Path, tensors: Mapping[str, torch.Tensor], base: str) -> None:
        """Writes a directory that ``PeftModel.from_pretrained`` loads onto the base model.

        Args:
            tensors: those that are trained, whole, by name.
            base: name or directory of the base model.
        """
        from peft import LoraConfig
        from safetensors.torch import save_file

        heads = sorted({name.rsplit(".", 1)[0] for name in tensors if ".lora_" not in name})
        adapted = {name.split(_A)[0].rsplit(".", 1)[-1] for name in tensors if _A in name}
        config = LoraConfig(
            r=self._lora.rank,
            lora_alpha=self._lora.alpha,
            target_modules=sorted(self._lora.targets or adapted),
            modules_to_save=heads or None,
            task_type="SEQ_CLS" if heads else "CAUSAL_LM",
            base_model_name_or_path=base,
            inference_mode=True,
        )
        path.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(path))
        named = {_PEFT_PREFIX + name.replace(".default.", "."): t.contiguous() for name, t in tensors.items()}
        save_file(named, path / "adapter_model.safetensors", metadata={"format": "pt"})
