"""The non-local block with its four pairwise functions, none of which holds all pairs (Wang et al. 2018).

Shapes: B batch, C channels, d width of the embeddings, (H, W) the map, N = H * W queries, K keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import global_attention
from .capture import logits_of, maps_of
from .checks import check_map, one_of, positive
from .memory_format import in_format_of, to_channels_last
from .relative_tables import Position, RelativeTables
from .renamed import renamed_method
from .zero_conv import ZeroConv2d

Mode = Literal["gaussian", "embedded_gaussian", "dot_product", "concatenation"]
MODES: tuple[Mode, ...] = get_args(Mode)
_CONVS = ("conv.", "0.conv.")  # what mmcv, without and with sub_sample, has between a projection and its parameter
_NORMS = ("bn", "gn", "in", "ln")  # mmcv's names of the normalisation within conv_out


class NonLocal2d(RelativeTables):
    """``x + conv_out(y)``, y_i = 1 / C(x) Σ_j f(x_i, x_j) g(x_j) over all positions j.

    Source: Wang et al. (2018), Eq. 1 to 6; numerics, defaults and checkpoints of mmcv's ``NonLocal2d``. ``conv_out``
    starts at 0: put into a trained network, the layer changes nothing at first.

    ====================== ==================================== ============ ==================== ===============
    mode                   f(x_i, x_j)                          C(x)         operations           memory
    ====================== ==================================== ============ ==================== ===============
    ``gaussian``           exp(x_i·x_j)                         Σ_j f        O(N K (C + d))       O(N (C + d))
    ``embedded_gaussian``  exp(θ(x_i)·φ(x_j) / √d)              Σ_j f        O(N K d)             O(N d)
    ``dot_product``        θ(x_i)·φ(x_j)                        K            O(N d²)              O(N d)
    ``concatenation``      ReLU(w·[θ(x_i), φ(x_j)])             K            O(N (d + log K))     O(N d)
    ====================== ==================================== ============ ==================== ===============

    beside the projections. The Gaussian modes run on ``ops.global_attention``. A dot product needs no pairs:
    (θ φᵀ) g = θ (φᵀ g). Nor does the concatenation: ReLU(a_i + b_j) is a_i + b_j for the keys with b_j > -a_i and 0
    for the others, so that prefix sums over the keys in order of b hold every query's answer.

    With ``position='relative'`` the logit of a Gaussian mode has q_i·(r_W[j_x - i_x] + r_H[j_y - i_y]), scaled as the
    content, added: the "NL+RPE" of the thesis' Table 3.2, by Bello et al. (2019), Eq. 2 to 4.

    Args:
        in_channels: C.
        reduction: d = C / reduction, at least 1.
        mode: f, see above.
        use_scale: False: no 1 / √d in ``embedded_gaussian``. (``gaussian`` never has it.)
        sub_sample: Keys and values are 2 × 2 maxima of their maps, K = ⌊H / 2⌋ ⌊W / 2⌋; an axis of one pixel stays.
            For relative positions each stands where the first of its pixels does.
        position: ``'none'`` or, for the Gaussian modes, ``'relative'``.
        input_size: (H, W) of the module's input, for which the relative tables are made.
        resize_tables: Interpolate the tables where a map, or a loaded state_dict, is made for another size than
            ``input_size``; False: an error.
        norm_layer: Makes a normalisation of C channels after ``conv_out``, which then has no bias, and starts at 0 in
            its place; None for none.

    Shapes:
        (B, C, H, W) -> (B, C, H, W)

    Raises:
        ValueError: an argument is out of its range, or does not fit the others.
    """

    def __init__(
        self,
        in_channels: int,
        reduction: int = 2,
        mode: Mode = "embedded_gaussian",
        use_scale: bool = True,
        sub_sample: bool = False,
        position: Position = "none",
        input_size: int | Sequence[int] | None = None,
        *,
        resize_tables: bool = True,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        positive(in_channels=in_channels, reduction=reduction)
        one_of(Mode, mode=mode)
        if position == "relative" and "gaussian" not in mode:
            raise ValueError(f"position 'relative' needs mode 'gaussian' or 'embedded_gaussian', got mode {mode!r}")
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        width = max(in_channels // reduction, 1)
        compared = in_channels if mode == "gaussian" else width
        super().__init__(position, input_size, compared, resize_tables, **factory)
        self.in_channels, self.reduction, self.width = in_channels, reduction, width
        self.mode, self.use_scale, self.sub_sample = mode, use_scale, sub_sample
        self.scale = width**-0.5 if mode == "embedded_gaussian" and use_scale else 1.0
        self.g = nn.Conv2d(in_channels, width, 1, **factory)
        self.theta: nn.Conv2d | None = None
        self.phi: nn.Conv2d | None = None
        self.concat_project: nn.Conv2d | None = None
        if mode != "gaussian":
            self.theta = nn.Conv2d(in_channels, width, 1, **factory)
            self.phi = nn.Conv2d(in_channels, width, 1, **factory)
        if mode == "concatenation":
            self.concat_project = nn.Conv2d(2 * width, 1, 1, bias=False, **factory)
        last = ZeroConv2d if norm_layer is None else nn.Conv2d
        self.conv_out = last(width, in_channels, 1, bias=norm_layer is None, **factory)
        self.norm = None if norm_layer is None else norm_layer(in_channels).to(**factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As mmcv: embeddings normal with deviation 0.01, ``conv_out``, or the normalisation after it, 0."""
        for projection in (self.g, self.theta, self.phi):
            if projection is not None:
                nn.init.normal_(projection.weight, std=0.01)
                assert projection.bias is not None
                nn.init.zeros_(projection.bias)
        if self.concat_project is not None:
            nn.init.kaiming_normal_(self.concat_project.weight, mode="fan_out", nonlinearity="relu")
        for parameter in (self.conv_out if self.norm is None else self.norm).parameters():
            nn.init.zeros_(parameter)
        super().reset_parameters()

    init_weights = renamed_method("init_weights")

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W).

        Raises:
            ValueError: the shape does not fit, or needs other tables and ``resize_tables`` is off.
        """
        query, key, value = self._embeddings(x)
        if "gaussian" in self.mode:
            row, column = self._position(query, key)
            attended = global_attention(query, key, value, row_logits=row, column_logits=column, scale=self.scale)
        elif self.concat_project is None:
            attended = dot_products(query.flatten(1, 3), key.flatten(1, 3), value.flatten(1, 3))
        else:
            of_query, of_key = self.concat_project.weight.view(2, self.width).unbind()
            a, b = query.flatten(1, 3).matmul(of_query), key.flatten(1, 3).matmul(of_key)
            attended = rectified_sums(a, b, value.flatten(1, 3))
        attended = attended.reshape(*query.shape[:4], self.width).squeeze(1).permute(0, 3, 1, 2)
        attended = self.conv_out(attended)
        return x + in_format_of(x, attended if self.norm is None else self.norm(attended))

    def attention_maps(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """The attention weights of a Gaussian mode: for inspection, O(N K) without ``queries``.

        Args:
            x: As ``forward``.
            queries: (Q, 2), rows and columns; None for all.

        Returns:
            (B, 1, H, W, Hk, Wk), queries before keys, or (B, 1, Q, Hk, Wk) of ``queries``.

        Raises:
            ValueError: as ``forward``; a query lies outside the map; or the mode has no attention weights.
        """
        if "gaussian" not in self.mode:
            raise ValueError(
                f"mode {self.mode!r} has no attention weights, which are positive and sum to 1: only 'gaussian' and "
                "'embedded_gaussian' have maps"
            )
        query, key, value = self._embeddings(x)
        terms = (query, key, value, *self._position(query, key), None)
        return maps_of(terms, self.scale, self.attention_size(x.shape[2:]), queries)

    def attention_logits(self, x: Tensor, queries: Tensor | None = None) -> dict[str, Tensor]:
        """The logits of content and of relative position.

        The softmax of their sum is :meth:`attention_maps`, whose arguments, axes and errors are the same.
        """
        if "gaussian" not in self.mode:
            raise ValueError(f"mode {self.mode!r} has no logits: only 'gaussian' and 'embedded_gaussian' have")
        query, key, value = self._embeddings(x)
        (row, column), size = self._position(query, key), self.attention_size(x.shape[2:])
        found = {"content": logits_of((query, key, value, None, None, None), self.scale, size, queries)}
        if row is not None:
            found["position"] = logits_of((None, None, value, row, column, None), self.scale, size, queries)
        return found

    def _embeddings(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, 1, H, W, ·), key and value (B, 1, Hk, Wk, ·)."""
        check_map(x, self.in_channels, self.g.weight)
        self.check_size(x)
        x = to_channels_last(x)
        query = x if self.theta is None else self.theta(x)
        key = x if self.phi is None else self.phi(x)
        value = self.g(x)
        if self.sub_sample:
            window = (self._stride(x.shape[2]), self._stride(x.shape[3]))
            key, value = F.max_pool2d(key, window), F.max_pool2d(value, window)
        query, key, value = (t.permute(0, 2, 3, 1).unsqueeze(1) for t in (query, key, value))
        return query, key, value

    def _stride(self, size: int) -> int:
        """Of the keys along an axis."""
        return 2 if self.sub_sample and size > 1 else 1

    def _position(self, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Row and column logits."""
        stride = (self._stride(query.shape[2]), self._stride(query.shape[3]))
        return self.table_logits(query, self.scale, key.shape[2:4], stride)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("g", "theta", "phi", "concat_project", "conv_out"):
            for conv, kind in itertools.product(_CONVS, ("weight", "bias")):
                _rename(state_dict, f"{prefix}{name}.{conv}{kind}", f"{prefix}{name}.{kind}")
        if self.norm is not None:
            for theirs in _NORMS:
                start = f"{prefix}conv_out.{theirs}."
                for key in [key for key in state_dict if key.startswith(start)]:
                    _rename(state_dict, key, f"{prefix}norm.{key.removeprefix(start)}")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, reduction={self.reduction}, mode={self.mode!r}, position={self.position!r}"
        text += "" if self.input_size is None else f", input_size={self.input_size}"
        text += "" if self.use_scale else ", use_scale=False"
        return text + (", sub_sample=True" if self.sub_sample else "")


def dot_products(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """1 / K Σ_j (q_i·k_j) v_j, for queries (B, N, d), keys (B, K, d) and values (B, K, dv): (B, N, dv)."""
    # Half of the factor in each operand: in float16 neither a sum over K overflows nor an operand underflows.
    factor = key.shape[1] ** -0.5
    return query.matmul((key * factor).transpose(1, 2).matmul(value * factor))


def rectified_sums(a: Tensor, b: Tensor, value: Tensor) -> Tensor:
    """1 / K Σ_j ReLU(a_i + b_j) v_j, in O(N log K + K log K + (N + K) dv) operations.

    Args:
        a: (B, N), of the queries.
        b: (B, K), of the keys.
        value: (B, K, dv).

    Returns:
        (B, N, dv).
    """
    dtype, K = value.dtype, b.shape[1]
    # In float64: the sums over all keys before the last may be far larger than a query's answer.
    a, b, value = a.double(), b.double(), value.double()
    order = b.argsort(1, descending=True)
    b = b.gather(1, order)
    value = value.gather(1, order.unsqueeze(2).expand_as(value))
    sums = F.pad(prefix_sums(torch.cat((value, value * b.unsqueeze(2)), 2)), (0, 0, 1, 0))  # of the first 0 ... K keys
    counts = torch.searchsorted(-b.detach(), a.detach().contiguous())  # of the keys with b_j > -a_i
    values, products = sums.gather(1, counts.unsqueeze(2).expand(-1, -1, sums.shape[2])).chunk(2, 2)
    return ((a.unsqueeze(2) * values + products) / K).to(dtype)


def prefix_sums(x: Tensor) -> Tensor:
    """Sums over the first 1 ... K rows of (B, K, c)."""
    if x.is_cuda and torch.are_deterministic_algorithms_enabled():  # for which PyTorch has no cumsum on CUDA
        return _prefix_sums_by_products(x)
    return x.cumsum(1)


def _prefix_sums_by_products(x: Tensor) -> Tensor:
    """The sums within about √K blocks of as many rows, and those of the blocks before."""
    B, K, c = x.shape
    side = math.isqrt(K - 1) + 1
    blocks = F.pad(x, (0, 0, 0, side * side - K)).view(B, side, side, c)
    lower = x.new_ones(side, side).tril()
    within = lower.matmul(blocks)
    before = lower.tril(-1).matmul(within[:, :, -1])
    return (within + before.unsqueeze(2)).flatten(1, 2)[:, :K]


def _rename(state_dict: dict[str, Any], key: str, new: str) -> None:
    if key in state_dict:
        state_dict[new] = state_dict.pop(key)
