"""One definition of an operator: schema, reference, backends and operation counts in, the rest out.

::

    ATTEND = Operator(
        "window_attention", Terms, Options, ("output", "log_sum_exp"),
        fake=..., reference=..., table=[...], operations=..., backward_operations=...,
    )
    output = ATTEND(Terms(query, key, value, position_logits), Options(...))

defines ``torch.ops.attn_plugins.window_attention`` and ``window_attention_backward`` on all devices, with fake
functions, gradients of both orders, ``torch.func``, autocast and FLOP formulas. Terms are the tensors that have
gradients; options are everything else, numbers and masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import backends, library, schemas, triton_launch
from .arguments import in_dtype, under_autocast
from .backends import Backend
from .batching import mapped
from .gradients import Differentiable, is_batched_gradient, second_gradients, traced, transformed, unobserved
from .plans import replay

NAMESPACE = "attn_plugins"
HAS_OPERATORS = hasattr(torch.library, "register_autograd")  # torch >= 2.4
_AUTOCAST_KEYS = [
    key
    for key in ("CPU", "CUDA", "XPU", "MPS", "HPU", "PrivateUse1")
    if hasattr(torch._C.DispatchKey, f"Autocast{key}")
]
OPERATORS: dict[str, Operator] = {}  # by name
_LIBRARY: list[Any] = []  # torch.library.Library, made at the first definition and never dropped

Results = tuple[Tensor, ...]


class Operator:
    """An operator of :mod:`attn_plugins.ops`.

    Args:
        name: In ``torch.ops.attn_plugins``.
        terms: A ``NamedTuple`` of the tensors that have gradients, each ``Tensor`` or ``Tensor | None``.
        options: A ``NamedTuple`` of everything else: ``int``, ``float``, ``bool``, ``str``, ``Sequence[int]``,
            ``Sequence[SymInt]`` for sizes, or a tensor without a gradient.
        results: Names of the results, the output first. Where there are others, the backward gets them and the output.
        needs_output: ``(terms, options)`` to whether the backward needs the output as well. Where it does not, it gets
            None, and callers may change the output in place. None: it always does.
        fake: ``(terms, options)`` to uninitialized results.
        fake_gradient: ``(name, term)`` to the uninitialized gradient of that term.
        reference: ``(terms, options)`` to the output: the slow, obvious definition, differentiable twice.
        table: Backends, the preferred first; the last one can compute everything.
        operations: Multiplications and additions of the forward, for terms whose tensors are shapes.
        backward_operations: Likewise of the backward, also for the list of gradients that are needed.
        cast: Names of the terms that take autocast's dtype; None for all.
        fill_value: Value of the auxiliary results when the output is empty.
        shared: Names of the terms that have no axis of images; every other tensor has it first.
        onnx: ``(terms, options)`` to the output of ONNX's own node in a running export, or None where it has none.
    """

    def __init__(
        self,
        name: str,
        terms: Any,
        options: Any,
        results: Sequence[str],
        *,
        needs_output: Callable[[Any, Any], bool] | None = None,
        fake: Callable[[Any, Any], Results],
        reference: Callable[[Any, Any], Tensor],
        table: Sequence[Backend],
        operations: Callable[[Any, Any], int],
        backward_operations: Callable[[Any, Any, Sequence[bool]], int],
        fake_gradient: Callable[[str, Tensor], Tensor] = lambda name, term: torch.empty_like(term),
        cast: Sequence[str] | None = None,
        fill_value: float = float("inf"),
        shared: Sequence[str] = (),
        onnx: Callable[[Any, Any], Tensor | None] | None = None,
    ):
        self.name, self.terms, self.options = name, terms, options
        self.fake, self.fake_gradient, self.reference, self.table = fake, fake_gradient, reference, table
        self._operations, self._backward_operations, self._fill_value = operations, backward_operations, fill_value
        self._onnx = onnx
        self._cast = [cast is None or field in cast for field in terms._fields]
        self._count = len(terms._fields)
        self._kept = range(len(results)) if len(results) > 1 else range(0)
        self._needs_output = needs_output
        self._shared = [n for n, field in enumerate(terms._fields) if field in shared]
        names = [backend.name for backend in table]
        compiled = "cuda" in names and library.failures()["cuda"] is None  # then Triton serves next to no call
        has_triton = triton_launch.NAME in names and not compiled
        self._of_state = terms._fields.index("value") if has_triton else None
        self._tensor_options = [
            number for number, kind in enumerate(schemas.field_types(options)) if kind in ("Tensor", "Tensor?")
        ]
        OPERATORS[name] = self
        if HAS_OPERATORS:
            self._define(results)

    def __call__(self, terms: Any, options: Any) -> Tensor:
        """Compute the output of checked terms."""
        if backends.explaining():
            raise backends.Explained(self._explain(terms, options))
        args = (*terms, *options)
        if HAS_OPERATORS and backends.forced() != backends.REFERENCE and unobserved(args):
            results = self._once.record(self._forward, args)
        elif self._by_reference():
            return under_autocast(lambda *cast: self._definition(self.terms(*cast), options), terms, self._cast)
        else:
            results = self._forward_operator(*args)
        return results if isinstance(results, Tensor) else results[0]

    def gradients(self, grad_output: Tensor, terms: Any, options: Any, needs: Sequence[bool]) -> list[Tensor | None]:
        """Compute the gradients of checked terms outside autograd.

        Args:
            grad_output: Gradient of the output.
            terms: Tensors of the forward, for an operator whose backward needs none of its results.
            options: Options of the forward.
            needs: For each term, whether its gradient is needed.

        Returns:
            A gradient for each term, None where it is not needed.
        """
        assert not self._kept, f"the backward of {self.name} needs results of its forward"
        if self._by_reference():
            needs = [need and term is not None for need, term in zip(needs, terms)]
            with torch.enable_grad():
                leaves = [t if t is None else t.detach().requires_grad_(need) for t, need in zip(terms, needs)]
                output = self.reference(self.terms(*leaves), options)
            wanted = [leaf for leaf, need in zip(leaves, needs) if need and leaf is not None]
            grads = iter(torch.autograd.grad(output, wanted, grad_output))
        else:
            computed = self._backward_operator(grad_output, *terms, *options, list(needs))
            grads = iter([grad for grad, need in zip(computed, needs) if need])
        return [next(grads) if need else None for need in needs]

    # --- what serves ----------------------------------------------------------------------------------------------

    def _by_reference(self) -> bool:
        """Return True where the definition must serve: an older torch has no operators, ONNX has few of ours."""
        if not HAS_OPERATORS or backends.forced() == backends.REFERENCE:
            return True
        return traced() and torch.onnx.is_in_onnx_export()  # the latter alone takes 5 µs

    def _definition(self, terms: Any, options: Any) -> Tensor:
        if self._onnx is not None and HAS_OPERATORS and backends.forced() != backends.REFERENCE:
            node = self._onnx(terms, options)
            if node is not None:
                return node
        return self.reference(terms, options)

    def _explain(self, terms: Any, options: Any) -> backends.Choice:
        if not HAS_OPERATORS:
            reason = f"torch {torch.__version__} defines no operators from Python, 2.4 is the first that does"
            return backends.Choice(backends.REFERENCE, {"any other backend": reason})
        if (name := backends.forced()) is None:
            return backends.survey(self.table, terms, options)
        if name != backends.REFERENCE:
            backends.choose(self.name, self.table, terms, options)
        return backends.Choice(name, {})

    # --- torch.library --------------------------------------------------------------------------------------------

    def _define(self, results: Sequence[str]) -> None:
        from torch.utils.flop_counter import register_flop_formula

        if not _LIBRARY:
            _LIBRARY.append(torch.library.Library(NAMESPACE, "FRAGMENT"))
        library, backward = _LIBRARY[0], f"{self.name}_backward"
        terms, options = schemas.arguments(self.terms), schemas.arguments(self.options)
        kept = [f"Tensor{'' if n or not self._needs_output else '?'} {results[n]}" for n in self._kept]
        gradients = [f"Tensor grad_{name}" for name in self.terms._fields]
        forward_schema = (
            f"({', '.join([*terms, *options])}) -> {schemas.returns([f'Tensor {name}' for name in results])}"
        )
        # Gradients that are not needed come back empty.
        backward_arguments = ["Tensor grad_output", *terms, *kept, *options, "bool[] needs"]
        backward_schema = f"({', '.join(backward_arguments)}) -> {schemas.returns(gradients)}"
        tags = (torch.Tag.pt2_compliant_tag,)
        library.define(self.name + forward_schema, tags=tags)
        library.define(backward + backward_schema, tags=tags)
        library.impl(self.name, self._forward, "CompositeExplicitAutograd")
        library.impl(backward, self._backward, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{self.name}", self._fake_forward, lib=library)
        torch.library.register_fake(f"{NAMESPACE}::{backward}", self._fake_backward, lib=library)
        operators = getattr(torch.ops, NAMESPACE)
        self._forward_operator = getattr(operators, self.name).default
        self._backward_operator = getattr(operators, backward).default
        self._once = Differentiable(self._forward_operator, self._setup_context, self._differentiate)
        twice = Differentiable(self._backward_operator, self._setup_context_twice, self._differentiate_twice)
        library.impl(self.name, self._once.kernel, "Autograd", with_keyset=True)
        library.impl(backward, twice.kernel, "Autograd", with_keyset=True)
        for device in _AUTOCAST_KEYS:
            key = f"Autocast{device}"
            library.impl(self.name, self._autocast_rule(self._forward_operator, key, casts=True), key)
            library.impl(backward, self._autocast_rule(self._backward_operator, key, casts=False), key)
        if hasattr(torch.library, "register_vmap"):  # torch >= 2.5
            torch.library.register_vmap(f"{NAMESPACE}::{self.name}", self._map_forward, lib=library)
            torch.library.register_vmap(f"{NAMESPACE}::{backward}", self._map_backward, lib=library)
        register_flop_formula(getattr(operators, self.name))(self.flops)
        register_flop_formula(getattr(operators, backward))(self.backward_flops)

    def _autocast_rule(self, operator: Any, key: str, casts: bool) -> Callable[..., Any]:
        """Cast the terms of the forward; either way autocast is off inside, where kernels choose dtypes themselves."""
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        count = self._count

        def rule(*args: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(keys):
                if casts:
                    device_type = next(t.device.type for t in args[:count] if t is not None)
                    args = (*in_dtype(torch.get_autocast_dtype(device_type), args[:count], self._cast), *args[count:])
                return operator(*args)

        return rule

    def _split(self, args: Sequence[Any]) -> tuple[Any, list[Tensor | None], Any]:
        """Return terms, kept results and options of a backward's arguments after ``grad_output``."""
        count, after = self._count, self._count + len(self._kept)
        options = self.options._make(args[after : after + len(self.options._fields)])
        return self.terms._make(args[:count]), list(args[count:after]), options

    def _forward(self, *args: Any) -> Any:
        if self._of_state is not None and (state := triton_launch.state(args[self._of_state])) is not None:
            return replay(self._compute, ("forward", self.name, *state), args)
        return self._compute(*args)

    def _compute(self, *args: Any) -> Any:
        terms, options = self.terms._make(args[: self._count]), self.options._make(args[self._count :])
        serving = backends.choose(self.name, self.table, terms, options)
        for term in terms:
            if term is not None and not term.numel():  # kernels get no empty output, which needs an empty term
                results = self.fake(terms, options)
                if not results[0].numel():
                    filled = [result.fill_(self._fill_value) for result in results]
                    return tuple(filled) if len(filled) > 1 else filled[0]
        return serving.forward(terms, options)

    def _backward(self, *args: Any) -> tuple[Tensor, ...]:
        if self._of_state is not None and (state := triton_launch.state(args[self._of_state + 1])) is not None:
            return replay(self._differentiate_output, ("backward", self.name, *state), args)
        return self._differentiate_output(*args)

    def _differentiate_output(self, grad_output: Tensor, *args: Any) -> tuple[Tensor, ...]:
        terms, kept, options = self._split(args)
        needs = args[-1]
        if grad_output.numel() == 0:
            grads = self._gradients(terms, needs)
            return tuple([grad_output.new_empty(0) if grad is None else grad.zero_() for grad in grads])
        serving = backends.choose(self.name, self.table, terms, options, backward=True)
        wanted = {name: need and term is not None for name, term, need in zip(terms._fields, terms, needs)}
        found = map(serving.backward(grad_output, terms, options, *kept, wanted).get, terms._fields)
        return tuple([grad_output.new_empty(0) if grad is None else grad for grad in found])

    def _gradients(self, terms: Any, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return uninitialized gradients, None where not needed."""
        return [
            self.fake_gradient(name, term) if term is not None and need else None
            for name, term, need in zip(self.terms._fields, terms, needs)
        ]

    def _fake_forward(self, *args: Any) -> Any:
        results = self.fake(self.terms(*args[: self._count]), self.options(*args[self._count :]))
        return results if len(results) > 1 else results[0]

    def _fake_backward(self, grad_output: Tensor, *args: Any) -> tuple[Tensor, ...]:
        grads = self._gradients(self._split(args)[0], args[-1])
        return tuple(grad_output.new_empty(0) if grad is None else grad for grad in grads)

    # --- gradients ------------------------------------------------------------------------------------------------

    def _setup_context(self, ctx: Any, inputs: tuple, output: Any) -> None:
        terms, options = inputs[: self._count], inputs[self._count :]
        ctx.set_materialize_grads(False)  # log-sum-exps and the like have none: zeros cost a launch each
        if not self._kept:
            return self._save(ctx, terms, options)
        results = list(output)
        if self._needs_output and not self._needs_output(self.terms(*terms), self.options(*options)):
            results[0] = None
        self._save(ctx, [*terms, *results], options)

    def _save(self, ctx: Any, tensors: Sequence[Tensor | None], options: Sequence[Any]) -> None:
        ctx.transformed, ctx.forced, ctx.options = transformed(), backends.forced(), options
        if masks := self._tensor_options:
            ctx.options = [None if n in masks else option for n, option in enumerate(options)]
            tensors = [*tensors, *[options[n] for n in masks]]
        ctx.save_for_backward(*tensors)

    def _saved(self, ctx: Any) -> tuple[Sequence[Tensor | None], Sequence[Any]]:
        """Return what :meth:`_save` was given."""
        if not self._tensor_options:
            return ctx.saved_tensors, ctx.options
        tensors, options = list(ctx.saved_tensors), list(ctx.options)
        for n in reversed(self._tensor_options):
            options[n] = tensors.pop()
        return tensors, options

    def _differentiate(self, ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple:
        others = (None,) * len(self.options._fields)
        needs = list(ctx.needs_input_grad[1 : self._count + 1])
        if grad_output is None or True not in needs:
            return (*[None] * self._count, *others)
        tensors, options = self._saved(ctx)
        direct = not (torch.is_grad_enabled() or ctx.transformed or is_batched_gradient(grad_output))
        direct = direct and unobserved((grad_output, *tensors))
        differentiate = self._backward if direct else self._backward_operator
        if ctx.forced is None:
            grads = differentiate(grad_output, *tensors, *options, needs)
        else:  # perhaps in another thread, or after the forward's `with` block
            now = backends.forced()
            with backends.backend(ctx.forced if now in (None, backends.REFERENCE) else now):
                grads = differentiate(grad_output, *tensors, *options, needs)
        return (*[grad if need else None for grad, need in zip(grads, needs)], *others)

    def _setup_context_twice(self, ctx: Any, inputs: tuple, output: Any) -> None:
        grad_output, *rest = inputs
        terms, _, options = self._split(rest)
        ctx.needs = rest[-1]
        self._save(ctx, [grad_output, *terms], options)

    def _differentiate_twice(self, ctx: Any, *grads: Tensor | None) -> tuple:
        """Differentiate the reference twice: what the forward kept are functions of the terms, no variables."""
        tensors, options = self._saved(ctx)
        wanted = ctx.needs_input_grad[1 : len(tensors) + 1]
        gradients = second_gradients(
            lambda *terms: self.reference(self.terms(*terms), self.options(*options)), tensors, ctx.needs, wanted, grads
        )
        return (*gradients, *[None] * (len(self._kept) + len(options) + 1))

    # --- vmap -----------------------------------------------------------------------------------------------------

    def _map_forward(self, info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        return mapped(self._forward_operator, info.batch_size, in_dims, args, self._shared)

    def _map_backward(self, info: Any, in_dims: Sequence[Any], *args: Any) -> Any:
        summed = any(args[-1][n] for n in self._shared)  # over the images of each call
        shared = None if summed else [n + 1 for n in self._shared]
        return mapped(self._backward_operator, info.batch_size, in_dims, args, shared)

    # --- operation counts -----------------------------------------------------------------------------------------

    def flops(self, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        """Count multiplications and additions of a call, as ``torch.utils.flop_counter`` does.

        Args:
            *args: Arguments of the operator, in its schema's order, with shapes in place of tensors.
            out_shape: Ignored; the result's shape, which the counter gives.
            **kwargs: Ignored, likewise.
        """
        return self._operations(self.terms(*args[: self._count]), self.options(*args[self._count :]))

    def backward_flops(self, grad_output: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        """Count likewise for a call of the operator's backward."""
        terms, _, options = self._split(args)
        return self._backward_operations(terms, options, args[-1])
