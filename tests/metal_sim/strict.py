"""The compile-only pass: is the text Metal, as far as clang and a list of rules can tell?

C++ for OpenCL has nearly Metal's rules for address spaces and language features. What it allows and
Metal does not is found in clang's syntax tree (pointers without address space, recursion, lambdas), in
its warnings, and by word. Nothing is executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from . import compiler
from .errors import Finding, Kind, MetalSimError
from .source import KERNEL_FILE, GeneratedSource, blank_comments_and_strings, threadgroup_declarations

_FORBIDDEN_WORDS = {
    "asm": "Metal has no inline assembly",
    "catch": "Metal has no exceptions",
    "delete": "Metal has no delete",
    "double": "Metal has no double",
    "dynamic_cast": "Metal has no run-time type information",
    "goto": "Metal has no goto",
    "new": "Metal has no new",
    "noexcept": "Metal has no noexcept",
    "printf": "Metal has no printf",
    "register": "Metal has no register",
    "std": "Metal has no std::, its library is metal::",
    "thread_local": "Metal has no thread_local",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "typeid": "Metal has no run-time type information",
    "virtual": "Metal has no virtual functions",
}
_METAL_MACROS = {"__METAL__", "__METAL_VERSION__"}

_WARNINGS = {
    "-Wimplicit-float-conversion": Kind.IMPLICIT_BFLOAT,
    "-Wimplicit-int-float-conversion": Kind.IMPLICIT_BFLOAT,
    "-Wuninitialized": Kind.UNINITIALISED,
    "-Wsometimes-uninitialized": Kind.UNINITIALISED,
    "-Warray-bounds": Kind.OUT_OF_BOUNDS,
    "-Wdivision-by-zero": Kind.UNDEFINED,
    "-Wreturn-type": Kind.UNDEFINED,
}
_DIAGNOSTIC = re.compile(
    rf"^{KERNEL_FILE}:(\d+):\d+: (error|fatal error|warning): (.*?)(?: \[(-W[\w-]+)\])?$", re.MULTILINE
)
_ADDRESS_SPACES = {"__global": "device", "__constant": "constant", "__local": "threadgroup"}

_checked: set[str] = set()


def check(source: GeneratedSource) -> None:
    """Raise MetalSimError if the source is not Metal. Done once for each text."""
    if source.text in _checked:
        return
    text = compiler.opencl_text(source)
    marker = compiler.cache_path(".checked", [text, source.text, Path(__file__).read_text()])
    if not marker.exists():
        findings = [*_word_findings(source), *_threadgroup_findings(source), *_clang_findings(text)]
        if findings:
            raise MetalSimError(source.kernel_name, [_placed(finding, source) for finding in findings])
        marker.touch()
    _checked.add(source.text)


def _placed(finding: Finding, source: GeneratedSource) -> Finding:
    line = finding.line
    return Finding(finding.kind, finding.message, line, source.place(line), source.line_text(line))


def _word_findings(source: GeneratedSource) -> Iterator[Finding]:
    for number, line in enumerate(blank_comments_and_strings(source.text).split("\n"), 1):
        if line.lstrip().startswith("#"):
            if re.match(r"\s*#\s*include\b", line) and not re.search(r"<metal_\w+>", line):
                yield Finding(Kind.DIALECT, "MLX compiles kernels without include paths", number)
            continue
        for word in re.findall(r"(?<![\w.])[A-Za-z_]\w*", line):
            if word in _FORBIDDEN_WORDS:
                yield Finding(Kind.DIALECT, _FORBIDDEN_WORDS[word], number)
            elif word.startswith("__") and word not in _METAL_MACROS:
                yield Finding(Kind.DIALECT, f"'{word}' is a compiler's internal name", number)


def _threadgroup_findings(source: GeneratedSource) -> Iterator[Finding]:
    signature = source.text.index(f"[[kernel]] void {source.kernel_name}(")
    for declaration in threadgroup_declarations(source.text):
        line = source.text.count("\n", 0, declaration.start) + 1
        name = declaration.names[0][0]
        if declaration.start < signature:
            message = f"threadgroup variable '{name}' outside the kernel function"
            yield Finding(Kind.ADDRESS_SPACE, message, line)
        if declaration.has_initialiser:
            yield Finding(Kind.DIALECT, f"threadgroup variable '{name}' cannot have an initialiser", line)


def _clang_findings(text: str) -> Iterator[Finding]:
    flags = compiler.with_prelude(compiler.code_flags(fma_contraction=False))
    result = compiler.run_clang([*flags, *_WARNINGS, "-fsyntax-only", "-Xclang", "-ast-dump", "-"], text)
    known = False
    for line, severity, message, warning in _DIAGNOSTIC.findall(result.stderr):
        if severity == "warning":
            kind = _WARNINGS.get(warning, Kind.UNDEFINED)  # a warning of a group may have its own name
            # Other types than bfloat may lose precision without a cast.
            if kind == Kind.IMPLICIT_BFLOAT and "__bf16" not in message.rpartition(" to ")[2]:
                continue
        else:
            mentions_space = "address space" in message or any(word in message for word in _ADDRESS_SPACES)
            kind = Kind.ADDRESS_SPACE if mentions_space else Kind.COMPILE
        known = True
        yield Finding(kind, _in_metal_words(message), int(line))
    if result.returncode and not known:
        yield Finding(Kind.COMPILE, result.stderr[-4000:])
    if not result.returncode:
        yield from _tree_findings(result.stdout)


def _in_metal_words(message: str) -> str:
    for opencl, metal in _ADDRESS_SPACES.items():
        message = message.replace(opencl, metal)
    return message.replace("__private ", "").replace("__private", "").replace("__generic ", "")


# ---------------------------------------------------------------------------------------------------
# The syntax tree, as `clang -ast-dump` prints it: one node a line, its depth shown by indentation,
#   | `-VarDecl 0x55d0 <line:3:1, col:14> col:8 used p 'float *' cinit
# A location leaves out its file and line when they are those of the location printed before.

_NODE = re.compile(r"^([\s|`-]*)(\w+) 0x([0-9a-f]+)(?: prev 0x([0-9a-f]+))?(.*)$")
_LOCATION = re.compile(r"(?:([^\s<>,:]+):)?(\d+):\d+|col:\d+")
_LOCATIONS = re.compile(r"(?: parent 0x[0-9a-f]+)? <[^>]*>(?: (?:[^\s<>,:]+:)?\d+:\d+| col:\d+)?")
_CALLED = re.compile(r"(?:Function|CXXMethod) 0x([0-9a-f]+)|MemberExpr .*(?:\.|->)\w+ 0x([0-9a-f]+)")
_QUOTED = re.compile(r"'([^']*)'")


def _tree_findings(tree: str) -> Iterator[Finding]:
    file, line = "", 0
    functions: list[tuple[int, str]] = []  # (depth, address) of the functions around the node
    implicit_depth: int | None = None  # of a member that the compiler has added, to be skipped
    lines: dict[str, int] = {}
    names: dict[str, str] = {}
    calls: dict[str, set[str]] = {}
    first_declaration: dict[str, str] = {}
    for row in tree.splitlines():
        node = _NODE.match(row)
        if node is None:
            continue
        depth, kind, address, previous, rest = len(node[1]), node[2], node[3], node[4], node[5]
        where, declared = _split_locations(rest)
        for location in _LOCATION.finditer(where):
            if location[2]:
                line = int(location[2])
                if location[1] and location[1] != "line":
                    file = location[1]
        while functions and functions[-1][0] >= depth:
            functions.pop()
        if kind in ("FunctionDecl", "CXXMethodDecl"):
            first = first_declaration.get(previous, previous) or address
            address = first_declaration.setdefault(address, first)
            functions.append((depth, address))
            name = re.search(r"(\w+) '", declared)
            lines[address], names[address] = line, name[1] if name else "?"
        if implicit_depth is not None and depth <= implicit_depth:
            implicit_depth = None
        if implicit_depth is None and " implicit" in declared.partition("'")[0]:
            implicit_depth = depth
        if file != KERNEL_FILE or implicit_depth is not None:
            continue
        if functions:
            for called in _CALLED.findall(row):
                calls.setdefault(functions[-1][1], set()).add(called[0] or called[1])
        if kind == "LambdaExpr":
            yield Finding(Kind.DIALECT, "Metal has no lambdas before version 3.2", line)
        message = _missing_address_space(kind, declared)
        if message:
            yield Finding(Kind.ADDRESS_SPACE, message, line)
    graph = {f: {first_declaration.get(c, c) for c in called} for f, called in calls.items()}
    for function in _recursive(graph):
        yield Finding(Kind.RECURSION, f"'{names[function]}' calls itself", lines[function])


def _split_locations(rest: str) -> tuple[str, str]:
    """Split what follows a node's address into its locations and the rest."""
    match = _LOCATIONS.match(rest)
    return (match[0], rest[match.end() :]) if match else ("", rest)


def _missing_address_space(kind: str, declared: str) -> str | None:
    """A pointer or reference that names no address space is `__generic` to clang, an error in Metal."""
    quoted = _QUOTED.search(declared)
    if quoted is None or "__generic" not in quoted[1]:
        return None
    shown = _in_metal_words(quoted[1])
    if kind in ("VarDecl", "ParmVarDecl", "FieldDecl"):
        name = re.search(r"(\w+) $", declared[: quoted.start()])
        return f"'{name[1] if name else '(unnamed)'}' points to no address space ({shown})"
    if kind in ("FunctionDecl", "CXXMethodDecl") and "__generic" in quoted[1].partition("(")[0]:
        return f"the returned pointer or reference has no address space ({shown})"
    if kind in ("CStyleCastExpr", "CXXStaticCastExpr", "CXXReinterpretCastExpr", "CXXFunctionalCastExpr"):
        return f"cast to a pointer without address space ({shown})"
    return None


def _recursive(calls: dict[str, set[str]]) -> list[str]:
    """The functions from which a chain of calls leads back to themselves."""

    def reaches_itself(function: str) -> bool:
        seen: set[str] = set()
        pending = list(calls.get(function, ()))
        while pending:
            called = pending.pop()
            if called == function:
                return True
            if called not in seen:
                seen.add(called)
                pending.extend(calls.get(called, ()))
        return False

    return [function for function in calls if reaches_itself(function)]
