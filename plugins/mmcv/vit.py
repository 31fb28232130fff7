"""timm's vision transformers as backbones of mmdet and mmsegmentation: ViT-Adapter and the simple feature pyramid."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor, nn

from .. import modules
from .backbones import import_timm


class _FromTimm(BaseModule):
    """Mixin for backbones of a ``vit``, which keeps timm's weights and may be frozen."""

    vit: Any

    def prepare(self, freeze_vit: bool | int, init_cfg: dict[str, Any] | None) -> None:
        """Freeze the transformer, and let ``init_weights`` load ``init_cfg`` and leave the transformer alone."""
        depth = len(self.vit.blocks)
        if not isinstance(freeze_vit, int) or not 0 <= freeze_vit <= depth:
            raise ValueError(
                f"freeze_vit must be True, False, or how many of the {depth} blocks to train, the last ones, "
                f"got {freeze_vit!r}"
            )
        self.freeze_vit, self.init_cfg = freeze_vit, init_cfg
        self.vit.is_init = True  # for mmengine, which otherwise calls the transformer's init_weights
        for part in self._frozen():
            part.requires_grad_(False)

    def _frozen(self) -> list[Any]:
        """Return the frozen modules and parameters of the transformer."""
        if self.freeze_vit is False:
            return []
        trained = 0 if self.freeze_vit is True else self.freeze_vit
        parts = [part for name, part in self.vit.named_children() if name != "blocks"]
        return [*self.vit.parameters(recurse=False), *parts, *self.vit.blocks[: len(self.vit.blocks) - trained]]

    def train(self, mode: bool = True) -> _FromTimm:
        """Set the training mode; what is frozen stays in evaluation mode, without dropout and stochastic depth."""
        super().train(mode)
        for part in self._frozen():
            if isinstance(part, nn.Module):
                part.eval()
        return self


class ViTAdapter(modules.ViTAdapter, _FromTimm):
    """:class:`attn_plugins.modules.ViTAdapter` of a timm model.

    Checkpoints of the paper's own class of this name load by :func:`from_official`, also within a detector.

    Args:
        vit: Name of a timm model, with the tag of its weights, such as ``vit_small_patch14_dinov2.lvd142m``.
        pretrained: True for the weights that timm downloads; or the path of a file with weights that timm can read,
            among them the original ones of many models, and whose keys must be complete.
        vit_kwargs: Other arguments of ``timm.create_model``: ``drop_path_rate``, ``attn_layer``, ``img_size``, and
            ``num_classes``, if the head in the file, which is left out, is not that of timm's weights (0: no head).
        freeze_vit: True to freeze the transformer; a number to train that many of its last blocks and nothing else.
        norm_cfg: Config of the normalizations; None for ``dict(type="SyncBN")``.
        init_cfg: Initialization of the whole backbone; None for timm's weights and the adapter's own.
        options: Other arguments of :class:`attn_plugins.modules.ViTAdapter`.

    Raises:
        ImportError: timm is not installed.
        FileNotFoundError: ``pretrained`` is no file.
        RuntimeError: timm cannot load the weights.
        TypeError: ``vit`` is no vision transformer like timm's ``VisionTransformer``, ``Eva`` and
            ``VisionTransformerSAM``.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        vit: str,
        pretrained: bool | str = False,
        vit_kwargs: dict[str, Any] | None = None,
        freeze_vit: bool | int = False,
        norm_cfg: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        def norm_layer(channels: int) -> nn.Module:
            return build_norm_layer(norm_cfg or dict(type="SyncBN"), channels)[1]

        super().__init__(create_vit(vit, pretrained, vit_kwargs), norm_layer=norm_layer, **options)
        self.prepare(freeze_vit, init_cfg)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}patch_embed.proj.weight" in state_dict:
            from_official(state_dict, prefix, getattr(self.vit.pos_embed, "shape", (1, 0))[1])
        super()._load_from_state_dict(state_dict, prefix, *args)


class ViTPyramid(modules.ViTPyramid, _FromTimm):
    """:class:`attn_plugins.modules.ViTPyramid` of a timm model; a detector needs no neck.

    Args:
        vit: As of :class:`ViTAdapter`, like the next three and ``init_cfg``; the same errors are raised.
        pretrained: Whether to load weights, or their file.
        vit_kwargs: Other arguments of ``timm.create_model``.
        freeze_vit: What to freeze.
        init_cfg: Initialization.
        options: Other arguments of :class:`attn_plugins.modules.ViTPyramid`.
    """

    def __init__(
        self,
        vit: str,
        pretrained: bool | str = False,
        vit_kwargs: dict[str, Any] | None = None,
        freeze_vit: bool | int = False,
        init_cfg: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(create_vit(vit, pretrained, vit_kwargs), **options)
        self.prepare(freeze_vit, init_cfg)


def create_vit(name: str, pretrained: bool | str = False, options: dict[str, Any] | None = None) -> Any:
    """Create a timm model without head and last normalization, for pictures of any size.

    Raises:
        FileNotFoundError: ``pretrained`` is no file.
        RuntimeError: timm cannot load the weights.
        TypeError: The model is no ``VisionTransformer``, ``Eva`` or ``VisionTransformerSAM``.
    """
    timm = import_timm("a ViT backbone is")
    given = dict(options or {})
    if not _is_sam(timm, name):  # SAM's encoder takes pictures of any size as it is
        given["dynamic_img_size"] = True
    if isinstance(pretrained, str):
        if not Path(pretrained).is_file():
            raise FileNotFoundError(f"pretrained must be True, False or the path of a file, got {pretrained!r}")
        # Where the number of classes is that of the weights, timm loads strictly, including the head.
        classes = {"num_classes": given["num_classes"]} if "num_classes" in given else {}
        given["pretrained_cfg_overlay"] = dict(file=pretrained, **classes)
    try:
        model = timm.create_model(name, pretrained=bool(pretrained), **given)
    except Exception as error:
        if "dynamic_img_size" in str(error):
            raise TypeError(
                f"vit must be a VisionTransformer, Eva or VisionTransformerSAM of timm, got {name!r}: {error}"
            ) from error
        if pretrained:
            raise RuntimeError(
                f"timm cannot load the weights of {name} by pretrained={pretrained!r}; without a network, pretrained "
                f"must be a file, whose weights must fit vit and vit_kwargs: {error}"
            ) from error
        raise
    model.prune_intermediate_layers(len(model.blocks), prune_norm=True, prune_head=True)
    return model


def _is_sam(timm: Any, name: str) -> bool:
    return timm.is_model(name) and timm.models.model_entrypoint(name).__module__.endswith("vision_transformer_sam")


_OFFICIAL = (  # patterns of the paper's parameters, and our names
    (r"((?:patch_embed|blocks)\..*|pos_embed)", r"vit.\1"),
    (r"(vit\.blocks\.\d+)\.gamma([12])", r"\1.ls\2.gamma"),
    (r"(.*\.ffn\.dwconv)\.dwconv(\..*)", r"\1\2"),
)


def from_official(state_dict: dict[str, Tensor], prefix: str = "", positions: int = 0) -> None:
    """Rename parameters of the paper's ``ViTAdapter`` in a checkpoint to those of :class:`ViTAdapter`.

    ==================================== ============================
    of the paper's code                  here
    ==================================== ============================
    ``patch_embed.*``, ``pos_embed``     ``vit.patch_embed.*``, ...
    ``blocks.N.*``                       ``vit.blocks.N.*``
    ``blocks.N.gamma1``                  ``vit.blocks.N.ls1.gamma``
    ``*.ffn.dwconv.dwconv.*``            ``*.ffn.dwconv.*``
    ==================================== ============================

    The others are equal. That transformer has no class token and no last normalization, so its counterpart has
    ``vit_kwargs=dict(class_token=False, global_pool="avg", init_values=1.0)``, the last one if it has layer scales.

    Args:
        state_dict: The checkpoint, which is changed.
        prefix: Beginning of the names, such as ``backbone.``.
        positions: Length of our ``pos_embed``; if it is one less than the checkpoint's, the class token's is left out.
    """
    for key in [key for key in state_dict if key.startswith(prefix)]:
        name, value = key.removeprefix(prefix), state_dict.pop(key)
        for pattern, ours in _OFFICIAL:
            name = re.sub(f"^{pattern}$", ours, name)
        if name == "vit.pos_embed" and value.shape[1] == positions + 1:
            value = value[:, 1:]
        state_dict[prefix + name] = value
