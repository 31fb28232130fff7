"""Options of ``spatial_transformer``: those of fairseq's Transformer under their flat names, and this package's.

The dataclasses serve both the command line (``--encoder-attention``) and hydra (``model.encoder_attention``).
"""

# ruff: noqa: UP045  fairseq reads the types of the fields: neither as strings nor as X | None
import logging
from argparse import Namespace
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Optional, get_args

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import OmegaConf

from ..modules.sequences.bilateral_1d import SequenceSmoothing
from ..terms.attention_type import AttentionTerms, parse_attention_type
from ..terms.nonlocal_position import Outside

POSITIONS = ("auto", "absolute", "none")
KERNEL_SIZES = {"dynamic": {"encoder": 31, "decoder": 31}, "bilateral": {"encoder": 21, "decoder": 11}}
SIZES = {"embed_dim": 512, "ffn_embed_dim": 2048, "attention_heads": 8, "layers": 6}
DYNAMIC_GROUPS = 16  # of DynamicConv1d, which divide its channels
OTHER_KINDS = ("dynamic", "bilateral", "shaw", "none")  # of self-attention, beside four bits
KINDS = "four bits (ε1 to ε4, such as 0110), shaw, dynamic, bilateral or none"
SHAW_VECTORS = ("keys_and_values", "keys")
OPTIONS_OF = {
    "shaw": ("shaw_distance", "shaw_vectors", "shaw_per_head"),
    "bilateral": ("bilateral_outside", "bilateral_smoothing"),
}
logger = logging.getLogger(__name__)


@dataclass
class SideOptions(FairseqDataclass):
    """Options that encoder and decoder have separately."""

    attention: str = field(
        default="1111",
        metadata={
            "help": "self-attention: four bits for the terms of content, query and position, key and position alone "
            "(for example 0110; quoted in YAML), dynamic (convolution), bilateral, shaw (relative positions up to a "
            "distance), or none"
        },
    )
    kernel_sizes: Optional[str] = field(
        default=None,
        metadata={
            "help": "kernel size of dynamic and bilateral: one number, or one per layer (3,7,15); "
            "default: dynamic 31, bilateral 21, in the decoder 11"
        },
    )
    positions: ChoiceEnum(POSITIONS) = field(  # type: ignore[valid-type]
        default="auto",
        metadata={
            "help": "absolute: add position embeddings to the words; none: do not; auto: add them if self-attention "
            "has no relative positions (bits without the second and the fourth, none; without --deformable), and with "
            "bilateral"
        },
    )


@dataclass
class SharedOptions(FairseqDataclass):
    """Options that encoder and decoder share."""

    deformable: bool = field(
        default=False, metadata={"help": "add a deformable convolution of kernel size 3 before every self-attention"}
    )
    offset_lr_scale: float = field(
        default=0.1,
        metadata={"help": "learning rate of the deformable convolution's offsets with Adam, relative to all others"},
    )
    attention_range: int = field(
        default=-1, metadata={"help": "odd number of keys around the query in self-attention by four bits; -1: all"}
    )
    query_key_bias: bool = field(
        default=False,
        metadata={"help": "add biases to queries and keys if the first bit is set, as in the original Transformer"},
    )
    bilateral_outside: ChoiceEnum(get_args(Outside)) = field(  # type: ignore[valid-type]
        default="zero", metadata={"help": "position logits of bilateral outside its kernel; write ...-outside=-inf"}
    )
    bilateral_smoothing: ChoiceEnum(get_args(SequenceSmoothing)) = field(  # type: ignore[valid-type]
        default="sqrt_d",
        metadata={"help": "divisor of bilateral's position logits; sqrt_embed_dim also divides its content logits"},
    )

    shaw_distance: int = field(
        default=16, metadata={"help": "distance at which shaw clips relative positions (k of Shaw et al. 2018)"}
    )
    shaw_vectors: ChoiceEnum(SHAW_VECTORS) = field(  # type: ignore[valid-type]
        default="keys_and_values", metadata={"help": "where shaw adds vectors of relative positions"}
    )
    shaw_per_head: bool = field(
        default=False, metadata={"help": "use a separate table of vectors per head of shaw instead of one for all"}
    )


@dataclass
class CrossOptions(FairseqDataclass):
    """Additional options of an encoder-decoder model."""

    cross_attention: str = field(
        default="1111",
        metadata={"help": "attention of the decoder to the encoder: four bits, like --encoder-attention"},
    )


def _flat(options: type, prefix: str) -> list[tuple[str, Any, Any]]:
    """Return the fields of a part of fairseq's configuration, prefixed as on the command line."""
    entries = []
    for part in fields(options):
        name, kind, default = f"{prefix}_{part.name}", part.type, part.default
        if part.name == "_name":
            continue
        if part.name == "layers_to_keep":  # a string that fairseq splits
            kind = Optional[str]
        if part.name in (*SIZES, "input_dim", "output_dim"):  # None leaves them to the architecture, also in hydra
            kind, default = Optional[int], None
        entries.append((name, kind, field(default=default, metadata=dict(part.metadata))))
    return entries


def _all_fields() -> list[tuple[str, Any, Any]]:
    sides = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig}
    entries = []
    for part in fields(TransformerConfig):
        if part.name in sides:
            entries += _flat(sides[part.name], part.name) + _flat(SideOptions, part.name)
        elif part.name == "quant_noise":
            entries += _flat(QuantNoiseConfig, part.name)
        elif part.name != "_name":
            entries.append((part.name, part.type, field(default=part.default, metadata=dict(part.metadata))))
    return entries


SpatialTransformerConfig = make_dataclass(
    "SpatialTransformerConfig", _all_fields(), bases=(CrossOptions, SharedOptions), namespace={"__module__": __name__}
)


SpatialTransformerLMConfig = make_dataclass(
    "SpatialTransformerLMConfig",
    [
        *(
            (f"decoder_{name}", Optional[int], field(default=None, metadata={"help": f"decoder: {name}"}))
            for name in SIZES
        ),
        *((f"decoder_{name}_dim", Optional[int], None) for name in ("input", "output")),
        *_flat(SideOptions, "decoder"),
    ],
    bases=(SharedOptions, TransformerLanguageModelConfig),
    namespace={"__module__": __name__},
)


def checked(options: Any, defaults: type, sides: tuple[str, ...] = ("encoder", "decoder")) -> Namespace:
    """Check the options, derive those that depend on others, and expand kernel sizes to one per layer.

    The result also has ``encoder_terms``, ``decoder_terms`` and ``cross_terms``, the :class:`.AttentionTerms` of four
    bits, or None for another kind of attention.

    Args:
        options: A dataclass, a ``DictConfig`` or a ``Namespace``; missing options get their defaults.
        defaults: The dataclass.
        sides: The sides that the model has: encoder, decoder or both.

    Raises:
        ValueError: An option is out of range or inconsistent with others.
    """
    values = vars(defaults()).copy()
    values.update(OmegaConf.to_container(options, resolve=True) if OmegaConf.is_config(options) else vars(options))
    # Outside hydra, references to the task's options stay unresolved; fairseq sets these options.
    args = Namespace(**{name: v for name, v in values.items() if not (isinstance(v, str) and v.startswith("${"))})
    for name, size in SIZES.items():
        if "encoder" in sides:
            _default(args, f"encoder_{name}", size)
            size = getattr(args, f"encoder_{name}") if "embed_dim" in name else size
        _default(args, f"decoder_{name}", size)
    _default(args, "decoder_input_dim", args.decoder_embed_dim)
    _default(args, "decoder_output_dim", args.decoder_embed_dim)
    for side in sides:
        _check_side(args, side)
    args.bilateral_outside, args.bilateral_smoothing = str(args.bilateral_outside), str(args.bilateral_smoothing)
    _check_shared(args, sides)
    _report_unused(args, vars(defaults()), sides)
    return args


def _default(args: Namespace, name: str, value: Any) -> None:
    if getattr(args, name) is None:
        setattr(args, name, value)


def _terms(attention: Any) -> Optional[AttentionTerms]:
    """Return the terms of four bits; None for anything else."""
    try:
        return parse_attention_type(attention)
    except ValueError:
        return None


def _check_side(args: Namespace, side: str) -> None:
    """Check the options of one side, and resolve its terms, kernel sizes and positions."""
    kind = getattr(args, f"{side}_attention")
    terms = _terms(kind)
    if terms is None and kind not in OTHER_KINDS:
        raise ValueError(f"--{side}-attention must be {KINDS} (in YAML the bits in quotes), got {kind!r}")
    if getattr(args, f"{side}_xformers_att_config") is not None:
        raise ValueError(f"--{side}-xformers-att-config is not supported: --{side}-attention chooses the attention")
    setattr(args, f"{side}_terms", terms)
    _check_sizes(args, side, kind, terms)
    setattr(args, f"{side}_kernel_sizes", _kernel_sizes(args, side, kind))
    positions = str(getattr(args, f"{side}_positions"))
    if positions not in POSITIONS:
        raise ValueError(f"--{side}-positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
    if positions == "auto":
        # Zhu et al. (2019), section 4.1, replace absolute positions by relative ones; the thesis' section 3.6 changes
        # only the self-attention of a Transformer with absolute ones. Shaw et al. (2018) found no benefit in
        # combining both.
        relative = args.deformable or kind in ("dynamic", "shaw") or (terms is not None and terms.relative)
        positions = "none" if relative and kind != "bilateral" else "absolute"
    elif positions == "absolute" and args.no_token_positional_embeddings:
        raise ValueError(f"--no-token-positional-embeddings contradicts --{side}-positions absolute")
    if positions == "none" and getattr(args, f"{side}_learned_pos"):
        raise ValueError(f"--{side}-learned-pos needs position embeddings: --{side}-positions absolute")
    setattr(args, f"{side}_positions", positions)


def _check_sizes(args: Namespace, side: str, kind: str, terms: Optional[AttentionTerms]) -> None:
    """Check the width and the heads of one side."""
    width, heads = getattr(args, f"{side}_embed_dim"), getattr(args, f"{side}_attention_heads")
    unit = DYNAMIC_GROUPS if kind == "dynamic" else 2 if terms is not None and terms.relative else 1
    if width < 1 or width % unit:
        raise ValueError(
            f"--{side}-embed-dim must be a positive multiple of {unit} with --{side}-attention {kind}, got {width}"
        )
    divides = kind not in ("dynamic", "none") or (side == "decoder" and not getattr(args, "no_cross_attention", True))
    if heads < 1 or (divides and width % heads):
        raise ValueError(f"--{side}-attention-heads must divide --{side}-embed-dim {width}, got {heads}")


def _kernel_sizes(args: Namespace, side: str, kind: str) -> list[Any]:
    """Return the kernel size of each layer; None without a kernel."""
    given, layers, kept = getattr(args, f"{side}_kernel_sizes"), getattr(args, f"{side}_layers"), _kept(args, side)
    if kind not in KERNEL_SIZES:
        if given is not None:
            raise ValueError(
                f"--{side}-kernel-sizes applies to dynamic and bilateral, got {given!r} with --{side}-attention "
                f"{kind}; --attention-range limits four bits"
            )
        return [None] * len(kept)
    if given is None:
        return [KERNEL_SIZES[kind][side]] * len(kept)
    sizes = _numbers(given)
    if len(sizes) == 1:
        sizes = sizes * layers
    if len(sizes) != layers or any(size < 1 or (side == "encoder" and size % 2 == 0) for size in sizes):
        parity = "odd " if side == "encoder" else ""
        raise ValueError(
            f"--{side}-kernel-sizes must be one positive {parity}number, or {layers} separated by commas, one per "
            f"layer, got {given!r}"
        )
    return [sizes[layer] for layer in kept]


def _numbers(text: Any) -> list[int]:
    """Parse numbers separated by commas; return none if the text is anything else."""
    try:
        return [int(number) for number in str(text).strip("[]() ").split(",")]
    except ValueError:
        return []


def _kept(args: Any, side: str) -> list[int]:
    """Return the layers of ``--...-layers-to-keep``, by default all."""
    keep, layers = getattr(args, f"{side}_layers_to_keep"), list(range(getattr(args, f"{side}_layers")))
    if not keep:
        return layers
    kept = sorted(_numbers(keep))
    if not kept or not set(kept) <= set(layers):
        raise ValueError(
            f"--{side}-layers-to-keep must be layers from 0 to {len(layers) - 1}, separated by commas, got {keep!r}"
        )
    return kept


def pruned_options(cfg: Any) -> dict[str, Any]:
    """Return the numbers of layers, and their kernel sizes, after ``--...-layers-to-keep``."""
    options: dict[str, Any] = {}
    for side in ("encoder", "decoder"):
        if keep := getattr(cfg, f"{side}_layers_to_keep", None):
            kept, sizes = sorted(_numbers(keep)), _numbers(getattr(cfg, f"{side}_kernel_sizes", None))
            options[f"{side}_layers"] = len(kept)
            if len(sizes) > 1:
                options[f"{side}_kernel_sizes"] = ",".join(str(sizes[layer]) for layer in kept)
    return options


def _check_shared(args: Namespace, sides: tuple[str, ...]) -> None:
    kinds = [getattr(args, f"{side}_attention") for side in sides]
    terms = [getattr(args, f"{side}_terms") for side in sides]
    n = args.attention_range
    if n != -1 and (n < 1 or n % 2 == 0):
        raise ValueError(f"--attention-range must be -1 (all keys) or a positive odd number, got {n}")
    if n != -1 and terms == [None] * len(terms):
        raise ValueError(
            f"--attention-range applies to self-attention by four bits, got {n} with {' and '.join(kinds)}"
        )
    if args.shaw_distance < 1:
        raise ValueError(f"--shaw-distance must be at least 1, got {args.shaw_distance}")
    args.shaw_vectors = str(args.shaw_vectors)
    if args.shaw_vectors not in SHAW_VECTORS:
        raise ValueError(f"--shaw-vectors must be one of {', '.join(SHAW_VECTORS)}, got {args.shaw_vectors!r}")
    if not 0 <= args.attention_dropout < 1:
        raise ValueError(f"--attention-dropout must be at least 0 and below 1, got {args.attention_dropout}")
    if not args.offset_lr_scale > 0:
        raise ValueError(f"--offset-lr-scale must be positive, got {args.offset_lr_scale}")
    if "encoder" in sides:
        args.cross_terms = _terms(args.cross_attention)
        if not args.no_cross_attention:
            kinds, terms = [*kinds, args.cross_attention], [*terms, args.cross_terms]
    if args.query_key_bias and not any(part is not None and part.content for part in terms):
        raise ValueError(f"--query-key-bias needs attention whose first bit is set, got {', '.join(kinds)}")
    if "encoder" not in sides:
        return
    if args.cross_terms is None:
        raise ValueError(
            f"--cross-attention must be four bits, got {args.cross_attention!r}: the others identify keys by their "
            "distance in the query's sequence; for a decoder without cross-attention use --no-cross-attention"
        )
    if args.cross_self_attention:
        raise ValueError("--cross-self-attention is not supported: encoder and decoder have no positions in common")


def _report_unused(args: Namespace, defaults: dict[str, Any], sides: tuple[str, ...]) -> None:
    """Warn of options that no part of the model uses; an error would make older checkpoints unreadable."""
    kinds = [getattr(args, f"{side}_attention") for side in sides]
    cross = "encoder" in sides and not args.no_cross_attention
    unused = [name for kind, names in OPTIONS_OF.items() if kind not in kinds for name in names]
    unused += [] if args.deformable else ["offset_lr_scale"]
    unused += [] if cross or set(kinds) - {"dynamic", "none"} else ["attention_dropout"]
    for name in unused:
        if str(getattr(args, name)) != str(defaults[name]):
            logger.warning(
                "--%s %s has no effect with self-attention by %s%s",
                name.replace("_", "-"),
                getattr(args, name),
                " and ".join(kinds),
                "" if args.deformable else " without --deformable",
            )
