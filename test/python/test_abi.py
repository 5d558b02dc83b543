# SPDX-License-Identifier: Apache-2.0
"""The table of heddle._abi says what heddle.h says."""

from __future__ import annotations

import ctypes
import pathlib
import re
import shutil
import subprocess

import pytest

from heddle import _abi

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = re.sub(r"/\*.*?\*/", "", (ROOT / "include/heddle.h").read_text(), flags=re.S)
PROTOTYPE = re.compile(r"HDL_API\s+(?:HDL_MUST_CHECK\s+)?([\w\s]+?[\s*]+)(hdl_\w+)\s*\(([^;]*)\);", re.S)
PLAIN = {
    "void": None,
    "int": ctypes.c_int,
    "bool": ctypes.c_bool,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
}
# Pointers whose type the table keeps; others are addresses.
POINTERS = {
    "char *": ctypes.c_char_p,
    "uint64_t *": ctypes.POINTER(ctypes.c_uint64),
    "int32_t *": ctypes.POINTER(ctypes.c_int32),
    "size_t *": ctypes.POINTER(ctypes.c_size_t),
}


def of_c_type(text: str) -> object:
    """The ctypes type that the table must have for a C type."""
    text = re.sub(r"\bconst\b", "", text)
    text = re.sub(r"\s+", " ", text).replace("* *", "**").strip()
    if text.startswith("enum") and "*" not in text:
        return ctypes.c_int
    if "*" not in text:
        return PLAIN[text]
    if text.endswith("**"):
        return ctypes.POINTER(ctypes.c_void_p)
    struct = re.fullmatch(r"struct (\w+) \*", text)
    if struct and struct[1] in _abi.STRUCTS:
        return ctypes.POINTER(_abi.STRUCTS[struct[1]])
    return POINTERS.get(text, ctypes.c_void_p)


def test_functions_are_those_of_the_export_map() -> None:
    exported = set(re.findall(r"\b(hdl_\w+);", (ROOT / "src/heddle.map").read_text()))
    assert set(_abi.FUNCTIONS) == exported


@pytest.mark.parametrize("result, name, arguments", PROTOTYPE.findall(HEADER), ids=lambda v: v[:40])
def test_prototype(result: str, name: str, arguments: str) -> None:
    if name == "hdl_group_on_view":  # takes a function pointer
        assert _abi.FUNCTIONS[name] == (ctypes.c_int, (ctypes.c_void_p, _abi.ViewCallback, ctypes.c_void_p))
        return
    types = []
    for argument in arguments.split(","):
        found = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*", argument, re.S)
        if found:
            types.append(_abi.Int32 if found[1] == "int32_t " else of_c_type(found[1]))
    expected_result = of_c_type(result)
    if name == "hdl_info":  # text that is written
        types[0] = ctypes.c_void_p
    assert _abi.FUNCTIONS[name] == (expected_result, tuple(types))


def test_structs_and_enums(tmp_path: pathlib.Path) -> None:
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    lines = ["#include <stdio.h>", "#include <heddle.h>", "int main(void) {"]
    expected = []
    for c_name, struct in _abi.STRUCTS.items():
        lines.append(f'printf("{c_name} %zu\\n", sizeof(struct {c_name}));')
        expected.append(f"{c_name} {ctypes.sizeof(struct)}")
        for field in struct._fields_:
            member = f"{c_name}.{field[0]}"
            lines.append(
                f'printf("{member} %zu %zu\\n", offsetof(struct {c_name}, {field[0]}), '
                f"sizeof(((struct {c_name} *)0)->{field[0]}));"
            )
            place = getattr(struct, field[0])
            expected.append(f"{member} {place.offset} {place.size}")
    for kind, prefix in _abi.ENUMS.values():
        for constant in kind:
            lines.append(f'printf("{prefix}{constant.name} %d\\n", {prefix}{constant.name});')
            expected.append(f"{prefix}{constant.name} {constant.value}")
    lines += ["return 0; }", ""]
    source, program = tmp_path / "probe.c", tmp_path / "probe"
    source.write_text("\n".join(lines))
    subprocess.run(["cc", f"-I{ROOT}/include", str(source), "-o", str(program)], check=True)
    found = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    assert found.splitlines() == expected


def test_every_struct_field_and_constant_of_the_header_is_there() -> None:
    for name, body in re.findall(r"struct (hdl_\w+) \{(.*?)\n\};", HEADER, re.S):
        fields = [field[0] for field in _abi.STRUCTS[name]._fields_]
        pointers = re.findall(r"\(\*(\w+)\)\s*\(", body)
        plain = re.sub(r"[^;]*\(\*\w+\)[^;]*;", "", body)
        names = [re.sub(r"\[.*?\]", "", w).strip(" *") for d in plain.split(";") for w in declared(d)]
        assert sorted(names + pointers) == sorted(fields), name
    for name, body in re.findall(r"enum (hdl_\w+) \{(.*?)\};", HEADER, re.S):
        kind, prefix = _abi.ENUMS[name]
        constants = re.findall(r"\b(HDL_\w+)", body)
        assert constants == [prefix + member.name for member in kind], name


def declared(declaration: str) -> list[str]:
    """Names in `type a, *b`."""
    words = declaration.split()
    if not words:
        return []
    start = 2 if words[0] in ("struct", "enum", "const") else 1
    if words[:2] in (["const", "struct"], ["const", "char"], ["const", "void"]):
        start = 3 if words[1] == "struct" else 2
    return " ".join(words[start:]).split(",")
