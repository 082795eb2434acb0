"""English that a machine can check: first words of docstrings, and names that are no nouns.

A function's docstring begins with a verb in the imperative, that of a class, a module or a property
with a noun. BUILD.md has the rest of the style.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("jaxserve", "pallas_kernels", "scripts")

VERBS = frozenset(
    """
Abort Accept Account Act Add Adjust Admit Advance Agree Align Allocate Allow Analyze Annotate
Answer Append Apply Arrange Ask Assemble Assert Assign Attach Attend Await Balance Begin Bind
Block Bound Break Bring Broadcast Buffer Build Cache Calculate Calibrate Call Cancel Carry Cast
Catch Change Charge Check Choose Claim Classify Clean Clear Close Collect Combine Come Commit
Compare Compile Complete Compute Concatenate Configure Connect Consume Continue Convert Copy
Correct Cost Count Cover Create Cut Deal Decide Declare Decode Decrease Define Delay Delete
Deliver Demand Depend Dequantize Derive Describe Detect Detokenize Determine Disconnect Discard
Dispatch Display Divide Do Download Drain Draw Drive Drop Dump Emit Empty Enable Encode End
Enforce Enqueue Enter Enumerate Estimate Evaluate Evict Examine Exclude Execute Exit Expand
Expect Explain Export Express Extend Extract Fail Feed Fetch Fill Filter Find Finish Fit Flatten
Flush Follow Forbid Force Forget Form Format Free Fuse Gather Generate Get Give Go Grant Grow
Guard Guess Hand Handle Hash Hold Identify Ignore Import Include Increase Index Infer Inform
Initialize Insert Inspect Install Interleave Interpret Invert Issue Iterate Join Judge Keep Kill
Label Launch Lay Learn Leave Let Limit Link List Listen Load Locate Lock Log Look Lookup Lower
Make Map Mark Mask Match Measure Merge Mix Move Multiply Name Narrow Normalize Note Notice
Notify Number Observe Offer Open Order Overwrite Pack Pad Parse Part Pass Patch Pause Perform
Permute Pick Place Plan Plot Point Pop Post Predict Prefix Prepare Preempt Print Probe Process
Produce Profile Promote Propose Provide Publish Pull Push Put Quantize Queue Quote Raise Rank
Read Rebuild Receive Recompute Record Recover Reduce Refuse Register Reject Release Reload
Remember Remove Rename Render Reorder Repeat Replace Replay Reply Report Represent Request
Require Resample Reserve Reset Reshape Resolve Respond Restart Restore Resume Retry Return Reuse
Reverse Rewrite Rotate Round Route Run Sample Save Say Scale Scan Schedule Score Search Seed
Select Send Separate Serialize Serve Set Shape Share Shift Show Shrink Shuffle Shut Sign
Simulate Size Skip Sleep Slice Slow Solve Sort Speak Specify Spell Split Spread Stack Start
State Step Stop Store Stream Strip Submit Subtract Sum Summarize Supply Swap Switch Take Tell
Test Throw Tie Tile Time Tokenize Trace Track Train Translate Transfer Transpose Treat Trim
Truncate Try Tune Turn Undo Unpack Update Upload Use Validate Verify View Visit Wait Wake Walk
Warm Warn Watch Weigh Widen Wire Withdraw Work Wrap Write Yield Zero Terminate Pretend Escape
Unescape Shorten Group Expire Tabulate Stamp Sweep Blend Rescale Dress Halve Rearrange
    """.split()
)
# Verbs that are nouns too, and may begin a class's docstring.
ALSO_NOUNS = frozenset(
    """
Step Request Answer Stream Queue State Time Part Form Index Plan Order Test Report Scale Tile Cost
Name Number Cache Call Block Format Prefix Work Trace Limit Label Shape Size View Mark Match
Slice Stack Process Profile Record Sample Score Share Log Model Guard Set List Map Mask Filter
Place Store
    """.split()
)
NO_NOUNS = frozenset(
    """
What How Whether Where Which Who Whose As Of That When If Whatever Knows Holds Says Tells Keeps
Makes Reads Finds Gives Runs Parts Writes
    """.split()
)
NO_NAMES = frozenset("one some of at told known asks lead well".split())

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_property(node: Function) -> bool:
    names = [getattr(d, "attr", getattr(d, "id", "")) for d in node.decorator_list]
    return any(name in ("property", "cached_property", "setter") for name in names)


def docstring_faults(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef | ast.Module):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        first = text.split()[0].strip(".,:;`'\"()")
        where = f"{getattr(node, 'lineno', 1)}: docstring begins with {first!r}"
        is_function = isinstance(node, Function)
        if is_function and not is_property(node):
            if first not in VERBS:
                yield f"{where}, no verb"
            continue
        no_nouns = NO_NOUNS - {"Whether"} if is_function else NO_NOUNS
        if isinstance(node, ast.ClassDef):
            no_nouns = no_nouns | (VERBS - ALSO_NOUNS)
        if first in no_nouns:
            yield f"{where}, no noun"


def field_names(tree: ast.Module) -> set[int]:
    """Collect the nodes that name fields, as ids: others may depend on these names."""
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {id(part.target) for body in bodies for part in body if isinstance(part, ast.AnnAssign)}


def name_faults(tree: ast.Module) -> Iterator[str]:
    fields = field_names(tree)
    for node in ast.walk(tree):
        stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
        if name in NO_NAMES and id(node) not in fields:
            yield f"{getattr(node, 'lineno', 1)}: a variable is named {name!r}"


def faults(source: str) -> list[str]:
    tree = ast.parse(source)
    return [*docstring_faults(tree), *name_faults(tree)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_style(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = [f"{path.relative_to(ROOT)}:{f}" for path in paths for f in faults(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """The pages."""',
        'def f():\n    """Whether it is."""',
        'async def f():\n    """Returns pages."""',
        'class A:\n    """What a row has."""',
        'class A:\n    """Return pages."""',
        'class A:\n    @property\n    def f(self):\n        """How many."""',
        '"""Where pages are."""',
        "one = 1",
        "for at in range(3): ...",
        "def f(told): ...",
        "[some for some in range(3)]",
    ],
)
def test_faults_are_found(source: str) -> None:
    assert len(faults(source)) == 1


def test_good_style_passes() -> None:
    source = """
        class Step:
            "Step of rows."
            at: float
            @property
            def is_empty(self):
                "Whether no row is left."
            def f(self):
                "Return `bool[n]`: the rows."
    """
    assert faults(textwrap.dedent(source)) == []
