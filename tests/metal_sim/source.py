"""Source text: from the arguments of `mx.fast.metal_kernel` to the Metal source that MLX compiles,
and from Metal source to the C++ for OpenCL that clang compiles for the CPU.

The first half must equal MLX's own text byte for byte (test_signature.py compares them). The second
half changes as little as possible and moves no line, so that every diagnostic points into the
generated Metal source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

THREAD_ATTRIBUTES: tuple[tuple[str, str], ...] = (
    ("dispatch_quadgroups_per_threadgroup", "uint"),
    ("dispatch_simdgroups_per_threadgroup", "uint"),
    ("dispatch_threads_per_threadgroup", "uint3"),
    ("grid_origin", "uint3"),
    ("grid_size", "uint3"),
    ("quadgroup_index_in_threadgroup", "uint"),
    ("quadgroups_per_threadgroup", "uint"),
    ("simdgroup_index_in_threadgroup", "uint"),
    ("simdgroups_per_threadgroup", "uint"),
    ("thread_execution_width", "uint"),
    ("thread_index_in_quadgroup", "uint"),
    ("thread_index_in_simdgroup", "uint"),
    ("thread_index_in_threadgroup", "uint"),
    ("thread_position_in_grid", "uint3"),
    ("thread_position_in_threadgroup", "uint3"),
    ("threadgroup_position_in_grid", "uint3"),
    ("threadgroups_per_grid", "uint3"),
    ("threads_per_grid", "uint3"),
    ("threads_per_simdgroup", "uint"),
    ("threads_per_threadgroup", "uint3"),
)
"""(name, type) in the order in which MLX appends them; runtime.cpp numbers them by position."""

CONSTANT_BELOW = 8
"""Inputs with fewer elements than this are passed in the constant address space."""

KERNEL_FILE = "kernel"
"""The file name under which clang reports lines of the generated source."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of the generated kernel function, in order."""

    role: Literal["input", "shape", "strides", "ndim", "output", "attribute"]
    name: str
    """Name of the input or output it belongs to, or of the thread attribute."""


@dataclass(frozen=True)
class InputType:
    """What the signature depends on of an input array."""

    dtype: str
    ndim: int
    size: int

    @property
    def is_constant(self) -> bool:
        return self.size < CONSTANT_BELOW


@dataclass(frozen=True)
class TemplateArgument:
    """A template argument: an int, a bool, or the Metal name of a dtype."""

    name: str
    value: int | bool | str

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else str(int(self.value))

    @property
    def parameter(self) -> str:
        kind = {str: "typename", bool: "bool"}.get(type(self.value), "int")
        return f"{kind} {self.name}"


@dataclass(frozen=True)
class GeneratedSource:
    """A complete Metal kernel, as MLX hands it to the Metal compiler behind its own headers."""

    text: str
    kernel_name: str
    template_arguments: str
    """Such as "<float, 4>", or "" for a kernel that is no template."""
    parameters: tuple[Parameter, ...]
    header_lines: int
    """Number of lines that come from the `header` argument."""
    body_line: int
    """Line on which the `source` argument starts, counted from 1."""

    def place(self, line: int) -> str:
        """A line of `text` as the kernel's author counts it."""
        if line < 1:
            return ""
        if line >= self.body_line:
            return f"body line {line - self.body_line + 1}"
        return f"header line {line}" if line <= self.header_lines else f"signature line {line}"

    def line_text(self, line: int) -> str:
        lines = self.text.split("\n")
        return lines[line - 1].strip() if 0 < line <= len(lines) else ""


def generate(
    name: str,
    header: str,
    source: str,
    inputs: Sequence[tuple[str, InputType]],
    outputs: Sequence[tuple[str, str]],
    template: Sequence[TemplateArgument] = (),
    atomic_outputs: bool = False,
) -> GeneratedSource:
    """The text that MLX 0.32 generates. `inputs` and `outputs` are (name, type) in order."""
    arguments = "<" + ", ".join(argument.text for argument in template) + ">" if template else ""
    kernel_name = _kernel_name(name, arguments, [kind for _, kind in inputs], [dtype for _, dtype in outputs])

    parameters: list[Parameter] = []
    declarations: list[str] = []

    def add_buffer(declaration: str, parameter: Parameter) -> None:
        declarations.append(f"{declaration} [[buffer({len(parameters)})]]")
        parameters.append(parameter)

    for input_name, kind in inputs:
        space, mark = ("constant" if kind.is_constant else "device"), ("*" if kind.ndim else "&")
        add_buffer(f"const {space} {kind.dtype}{mark} {input_name}", Parameter("input", input_name))
        if kind.ndim == 0:
            continue
        # MLX looks for the bare text, wherever it occurs in the body.
        if f"{input_name}_shape" in source:
            add_buffer(f"const constant int* {input_name}_shape", Parameter("shape", input_name))
        if f"{input_name}_strides" in source:
            add_buffer(f"const constant int64_t* {input_name}_strides", Parameter("strides", input_name))
        if f"{input_name}_ndim" in source:
            add_buffer(f"const constant int& {input_name}_ndim", Parameter("ndim", input_name))
    for output_name, dtype in outputs:
        element = f"atomic<{dtype}>" if atomic_outputs else dtype
        add_buffer(f"device {element}* {output_name}", Parameter("output", output_name))
    for attribute, attribute_type in THREAD_ATTRIBUTES:
        if attribute in source:
            declarations.append(f"{attribute_type} {attribute} [[{attribute}]]")
            parameters.append(Parameter("attribute", attribute))

    head = header
    if template:
        head += "template <" + ", ".join(argument.parameter for argument in template) + ">\n"
    head += f"[[kernel]] void {kernel_name}(\n  " + ",\n  ".join(declarations) + ") {\n"
    text = f"{head}{source}\n}}\n"
    if template:
        instance = f"{kernel_name}{arguments}"
        text += f'\ntemplate [[host_name("{kernel_name}")]] [[kernel]] decltype({instance}) {instance};\n'
    return GeneratedSource(
        text=text,
        kernel_name=kernel_name,
        template_arguments=arguments,
        parameters=tuple(parameters),
        header_lines=header.count("\n") + (not header.endswith("\n")) if header else 0,
        body_line=head.count("\n") + 1,
    )


def _kernel_name(name: str, arguments: str, inputs: Sequence[InputType], outputs: Sequence[str]) -> str:
    text = f"custom_kernel_{name}"
    if arguments:
        text += "_" + re.sub(r"<|>|, |-", "_", arguments).removesuffix("_")
    for kind in inputs:
        suffix = "s" if kind.ndim == 0 else "c" if kind.is_constant else ""
        text += f"_{kind.dtype}{suffix}"
    return text + "".join(f"_{dtype}" for dtype in outputs)


# ---------------------------------------------------------------------------------------------------
# Reading Metal source

_TOKEN = re.compile(
    r"""//[^\n]*            # comment to the end of the line
      | /\*.*?\*/           # comment
      | "(?:\\.|[^"\\])*"   # string
      | '(?:\\.|[^'\\])*'   # character
      | [A-Za-z_]\w*        # word
      | \d[\w.]*            # number
      | \s+
      | .""",
    re.DOTALL | re.VERBOSE,
)
_WORD = re.compile(r"[A-Za-z_]\w*\Z")


def blank_comments_and_strings(text: str) -> str:
    """The same text, every character of a comment or literal a blank; no line or column moves."""

    def blank(match: re.Match[str]) -> str:
        token = match.group()
        return re.sub(r"[^\n]", " ", token) if token.startswith(("//", "/*", '"', "'")) else token

    return _TOKEN.sub(blank, text)


@dataclass(frozen=True)
class ThreadgroupDeclaration:
    """A declaration statement of threadgroup variables: `threadgroup float a[32], b;`."""

    start: int
    """Offset of the word `threadgroup`."""
    end: int
    """Offset behind the semicolon."""
    names: tuple[tuple[str, int], ...]
    """(name, offset) of each variable."""
    has_initialiser: bool


def threadgroup_declarations(text: str) -> list[ThreadgroupDeclaration]:
    """All declarations of threadgroup variables; pointers and parameters are not among them."""
    code = blank_comments_and_strings(text)
    code = re.sub(r"^[ \t]*#[^\n]*", lambda directive: " " * len(directive[0]), code, flags=re.MULTILINE)
    tokens = [(match.group(), match.start()) for match in _TOKEN.finditer(code) if not match[0].isspace()]
    found = []
    for index, (word, start) in enumerate(tokens):
        if word == "threadgroup" and (index == 0 or tokens[index - 1][0] in ";{}"):
            declaration = _read_declaration(tokens, index + 1, start)
            if declaration is not None:
                found.append(declaration)
    return found


def _read_declaration(
    tokens: Sequence[tuple[str, int]], index: int, start: int
) -> ThreadgroupDeclaration | None:
    """Read declarators up to the semicolon. None for a pointer, a reference or no declaration."""
    names: list[tuple[str, int]] = []
    last_word: tuple[str, int] | None = None  # the word before `[`, `=`, `,` or `;` is the variable
    depth, in_initialiser, has_initialiser = 0, False, False
    for position in range(index, len(tokens)):
        token, offset = tokens[position]
        if token in "([{" or (token == "<" and not in_initialiser):
            depth += 1
        elif token in ")]}" or (token == ">" and not in_initialiser):
            depth -= 1
        elif depth > 0:
            continue
        elif token in "*&":
            return None
        elif token == "=":
            in_initialiser = has_initialiser = True
        elif token in ",;":
            if last_word is not None:
                names.append(last_word)
            last_word, in_initialiser = None, False
            if token == ";":
                return ThreadgroupDeclaration(start, offset + 1, tuple(names), has_initialiser)
        elif _WORD.match(token) and not in_initialiser:
            last_word = (token, offset)
    return None


# ---------------------------------------------------------------------------------------------------
# Metal source -> C++ for OpenCL

_VECTOR = r"(?:metal::)?(?:(?:float|half|bfloat|u?int|u?short|u?char|u?long)[234]|vec<[^<>;(){}]+>)"
_VECTOR_CONSTRUCTOR = re.compile(rf"(?<![\w<:])(?:static_cast<\s*({_VECTOR})\s*>|({_VECTOR}))(\s*)\(")
_ATTRIBUTE = re.compile(r"\[\[[^\[\]]*\]\]")
_EXPLICIT_INSTANTIATION = re.compile(r"^template \[\[host_name.*$", re.MULTILINE)


def to_opencl(text: str) -> str:
    """Rewrite what C++ for OpenCL spells otherwise. Lines stay where they are.

    * A threadgroup variable becomes a reference into memory of the runtime. (A static variable would
      not do: the optimiser reasons from its size and removes the very accesses to be checked.)
    * `float4(a, b)` becomes a call: ext_vector_type has no such constructor.
    * Attributes in double brackets and the explicit instantiation go.
    """
    pieces, position = [], 0
    for declaration in threadgroup_declarations(text):
        pieces.append(text[position : declaration.start])
        pieces.append(_runtime_variable(text, declaration))
        position = declaration.end
    text = "".join(pieces) + text[position:]
    text = _EXPLICIT_INSTANTIATION.sub("", text)
    text = _ATTRIBUTE.sub("", text)
    return _VECTOR_CONSTRUCTOR.sub(r"metal_sim::make_vector<\1\2>\3(", text)


def _runtime_variable(text: str, declaration: ThreadgroupDeclaration) -> str:
    """`threadgroup T x[n];` -> `typedef T x__type[n]; threadgroup x__type& x = <runtime memory>;`"""
    pieces, position = ["typedef "], declaration.start + len("threadgroup")
    for name, offset in declaration.names:
        pieces.append(text[position:offset] + f"{name}__type")
        position = offset + len(name)
    pieces.append(text[position : declaration.end])
    line = text.count("\n", 0, declaration.start) + 1
    for name, _ in declaration.names:
        pieces.append(
            f" threadgroup {name}__type& {name} = *(threadgroup {name}__type*)msim_threadgroup_variable("
            f'sizeof({name}__type), alignof({name}__type), "{name}", {line});'
        )
    return "".join(pieces)
