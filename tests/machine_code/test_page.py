"""The examples of the page of scripts/machine_code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.lib.paths import ROOT

PAGE = ROOT / "scripts/machine_code/README.md"
DOUBLE = """
.visible .entry my_kernel(.param .u64 a, .param .u64 b) .reqntid 32, 1, 1
{
.reg .b32 %r<4>;
.reg .b64 %d<4>;
ld.param.b64 %d0, [a];
ld.param.b64 %d1, [b];
mov.u32 %r0, %tid.x;
mad.wide.u32 %d2, %r0, 4, %d0;
mad.wide.u32 %d3, %r0, 4, %d1;
ld.global.b32 %r1, [%d2];
add.f32 %r2, %r1, %r1;
st.global.b32 [%d3], %r2;
ret;
}
"""


def test_the_first_example_runs_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernel.ptx").write_text(DOUBLE)
    monkeypatch.chdir(tmp_path)
    example = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    exec(compile(example, PAGE.name, "exec"), {})
    printed = capsys.readouterr().out
    assert "60. 62." in printed and printed.split()[-1] == str(32 * 9)
