"""Small models of the families of transformers that sample, from configs with random weights."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor, nn

SIZE = (64, 96)


def _config(name: str, **options: Any) -> Any:
    return getattr(transformers, name)(**options)


def _resnet(stages: tuple[int, ...] = (2, 3, 4), kind: str = "ResNetConfig") -> Any:
    options = dict(embedding_size=8, hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], layer_type="basic")
    return _config(kind, **options, out_features=[f"stage{stage}" for stage in stages])


def _swin(stages: tuple[int, ...] = (1, 2, 3, 4)) -> Any:
    return transformers.SwinConfig(
        embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 2, 2], window_size=4, image_size=64,
        out_features=[f"stage{stage}" for stage in stages],
    )  # fmt: skip


def _bert() -> Any:
    return transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )


# transformers 4 takes its default backbone, pretrained, otherwise
PLAIN = dict(use_timm_backbone=False, use_pretrained_backbone=False, backbone=None)
SHARED = dict(d_model=32, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=7, decoder_layers=2)
HEADS = dict(encoder_attention_heads=2, decoder_attention_heads=4)


def _deformable_detr(**options: Any) -> nn.Module:
    given: dict[str, Any] = dict(**PLAIN, backbone_config=_resnet(), encoder_layers=1)
    config = transformers.DeformableDetrConfig(**SHARED, **HEADS, **given, num_feature_levels=4, **options)
    return transformers.DeformableDetrForObjectDetection(config)


def _dino(prefix: str) -> Callable[[], nn.Module]:
    def build(**options: Any) -> nn.Module:
        given: dict[str, Any] = dict(**PLAIN, backbone_config=_swin((2, 3, 4)), text_config=_bert())
        config = _config(
            f"{prefix}Config", **SHARED, **HEADS, **given, encoder_layers=1, max_text_len=8, fusion_droppath=0.0,
            **options,
        )  # fmt: skip
        return getattr(transformers, f"{prefix}ForObjectDetection")(config)

    return build


REAL_TIME = dict(
    encoder_hidden_dim=32, encoder_in_channels=[8, 16, 16], decoder_in_channels=[32, 32, 32], num_denoising=0
)


def _real_time(prefix: str, stages: tuple[int, ...] = (2, 3, 4), **given: Any) -> Callable[[], nn.Module]:
    def build(**options: Any) -> nn.Module:
        backbone = dict(backbone_config=_resnet(stages, "RTDetrResNetConfig"))
        chosen = {**SHARED, **HEADS, **REAL_TIME, **backbone, **given, **options}
        return getattr(transformers, f"{prefix}ForObjectDetection")(_config(f"{prefix}Config", **chosen))

    return build


def _light(prefix: str, backbone: str, **given: Any) -> Callable[[], nn.Module]:
    def build(**options: Any) -> nn.Module:
        vit = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=64, num_windows=4)
        common = dict(
            d_model=32, decoder_ffn_dim=16, num_queries=7, decoder_layers=2, decoder_self_attention_heads=2,
            decoder_cross_attention_heads=4, group_detr=2,
        )  # fmt: skip
        config = _config(f"{prefix}Config", backbone_config=_config(backbone, **vit, **given.pop("vit", {})),
                         **common, **given, **options)  # fmt: skip
        return getattr(transformers, f"{prefix}ForObjectDetection")(config)

    return build


def _omdet_turbo(**options: Any) -> nn.Module:
    text = transformers.CLIPTextConfig(
        vocab_size=50, bos_token_id=48, hidden_size=16, intermediate_size=16, projection_dim=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8, eos_token_id=49,
    )  # fmt: skip
    config = transformers.OmDetTurboConfig(
        **PLAIN, backbone_config=_swin((2, 3, 4)), text_config=text,
        encoder_in_channels=[16, 32, 64], text_projection_in_dim=16, text_projection_out_dim=16, class_embed_dim=16,
        encoder_hidden_dim=32, decoder_hidden_dim=32, vision_features_channels=[32, 32, 32], num_queries=7,
        encoder_dim_feedforward=16, decoder_dim_feedforward=16, decoder_num_layers=2, decoder_num_heads=4,
        encoder_attention_heads=2, task_encoder_hidden_dim=16, image_size=64,
        apply_layernorm_after_vision_backbone=False, **options,
    )  # fmt: skip
    return transformers.OmDetTurboForObjectDetection(config)


def _universal(prefix: str, **given: Any) -> Callable[[], nn.Module]:
    def build(**options: Any) -> nn.Module:
        config = _config(
            f"{prefix}Config", backbone_config=_swin(), encoder_feedforward_dim=16, dim_feedforward=16, hidden_dim=32,
            encoder_layers=1, decoder_layers=2, num_attention_heads=4, num_queries=7, dropout=0.0, **given, **options,
        )  # fmt: skip
        return getattr(transformers, f"{prefix}ForUniversalSegmentation")(config)

    return build


TWO = {0: "a", 1: "b"}
READING = dict(
    reading_order_config=dict(
        hidden_size=32, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1, num_classes=2,
        coordinate_size=6, shape_size=4, global_pointer_head_size=8,
    )
)  # fmt: skip
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "deformable_detr": _deformable_detr,
    "grounding_dino": _dino("GroundingDino"),
    "mm_grounding_dino": _dino("MMGroundingDino"),
    "omdet_turbo": _omdet_turbo,
    "rt_detr": _real_time("RTDetr"),
    "rt_detr_v2": _real_time("RTDetrV2"),
    "d_fine": _real_time("DFine", decoder_n_points=[3, 6, 2], lqe_hidden_dim=16),
    "deimv2": _real_time("Deimv2", decoder_n_points=[3, 6, 2], lqe_hidden_dim=16),
    "lw_detr": _light("LwDetr", "LwDetrViTConfig", projector_scale_factors=[2.0, 0.5]),
    "rf_detr": _light("RfDetr", "RfDetrDinov2Config"),
    "pp_doclayout_v2": _real_time(
        "PPDocLayoutV2", class_thresholds=[0.0, 0.0], class_order=[0, 1], id2label=TWO, **READING
    ),
    "pp_doclayout_v3": _real_time("PPDocLayoutV3", stages=(1, 2, 3, 4), x4_feat_dim=8),
    "pp_doclayout_v4": _real_time("PPDocLayoutV4"),
    "mask2former": _universal("Mask2Former", feature_size=32, mask_feature_size=32),
    "oneformer": _universal(
        "OneFormer",
        conv_dim=32,
        mask_dim=32,
        task_seq_len=6,
        text_encoder_width=16,
        text_encoder_num_layers=1,
        text_encoder_vocab_size=50,
        text_encoder_context_length=6,
    ),  # fmt: skip,
}


INSTALLED = [family for family in FAMILIES if find_spec(f"transformers.models.{family}") is not None]


def build(family: str, **options: Any) -> nn.Module:
    """Return a model in eval mode whose weights are large enough for every layer to matter."""
    torch.manual_seed(0)
    model = FAMILIES[family](**options)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    return model.eval()


def inputs(family: str, B: int = 2) -> dict[str, Tensor]:
    """Return a batch of pictures of unequal sizes, with masks where the family takes them, and with text."""
    generator = torch.Generator().manual_seed(1)
    H, W = (64, 64) if family in ("lw_detr", "rf_detr") else SIZE
    given: dict[str, Any] = dict(pixel_values=torch.randn(B, 3, H, W, generator=generator))
    if family not in ("omdet_turbo",):
        mask = torch.ones(B, H, W, dtype=torch.long)
        mask[1:, 40:], mask[1:, :, 48:] = 0, 0
        given["pixel_mask"] = mask
    words = torch.randint(4, 40, (B, 6), generator=generator)
    if "dino" in family:
        given["input_ids"] = words
    if family == "oneformer":
        given["task_inputs"] = words
    if family == "omdet_turbo":
        ones = torch.ones_like(words)
        given |= dict(classes_input_ids=words, classes_attention_mask=ones, classes_structure=torch.tensor([1] * B),
                      tasks_input_ids=words, tasks_attention_mask=ones)  # fmt: skip
    return given
