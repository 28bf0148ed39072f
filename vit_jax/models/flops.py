"""The FLOPs of any function: 2 per multiply-add of its matrix products and convolutions."""

import math
from collections.abc import Callable, Iterator

import jax


def count_flops(function: Callable, *arguments) -> int:
    """FLOPs of one call; `arguments`: arrays or their shapes. Of a loop whose length is not known,
    one pass counts.
    """
    return of_jaxpr(jax.make_jaxpr(function)(*arguments).jaxpr)


def of_jaxpr(jaxpr) -> int:
    return sum(map(of_equation, jaxpr.eqns))


def of_equation(equation) -> int:
    name = equation.primitive.name
    output = math.prod(equation.outvars[0].aval.shape) if equation.outvars else 0
    if name == "dot_general":
        shape = equation.invars[0].aval.shape
        contracted = equation.params["dimension_numbers"][0][0]
        return 2 * output * math.prod(shape[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        out_features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
        return 2 * output * math.prod(kernel) // out_features
    inner = [of_jaxpr(jaxpr) for jaxpr in inner_jaxprs(equation)]
    if name == "cond":
        return max(inner)
    return sum(inner) * equation.params.get("length", 1)


def inner_jaxprs(equation) -> Iterator:
    for value in equation.params.values():
        for item in value if isinstance(value, tuple) else (value,):
            item = getattr(item, "jaxpr", item)
            if hasattr(item, "eqns"):
                yield item
