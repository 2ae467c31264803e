"""The repository's own rules: where files may be, how large, what is public, what is documented."""

import ast
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import chunkcache
from chunkcache.errors import ChunkCacheError
from chunkcache.settings import Settings

ROOT = Path(__file__).parent.parent
PLACES = ("kernels", "retriever", "api", "eval")
PACKAGES = [ROOT / "chunkcache", *(ROOT / p / f"chunkcache_{p}" for p in PLACES)]
MAX_LINES = 400
PICKLE_READER = Path("chunkcache/model/pickle_checkpoint.py")


def _modules() -> list[Path]:
    return sorted(p for package in PACKAGES for p in package.rglob("*.py"))


@pytest.mark.parametrize("place", PLACES)
def test_places_are_not_packages(place: str) -> None:
    assert not (ROOT / place / "__init__.py").exists()
    packages = [p.name for p in (ROOT / place).iterdir() if (p / "__init__.py").exists()]
    assert packages == [f"chunkcache_{place}"]


def test_every_package_is_typed() -> None:
    assert all((package / "py.typed").is_file() for package in PACKAGES)


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_file_is_longer_than_one_sitting() -> None:
    files = [*_modules(), *(ROOT / "tests").rglob("*.py")]
    lines = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    offenders = {str(p.relative_to(ROOT)): n for p, n in lines.items() if n > MAX_LINES}
    assert not offenders, offenders
    product = sorted(lines[p] for p in _modules())
    assert product[len(product) // 2] <= 150, "the median module is longer than 150 lines"


def test_the_public_names() -> None:
    assert sorted(chunkcache.__all__) == chunkcache.__all__
    assert all(hasattr(chunkcache, name) for name in chunkcache.__all__)


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_every_setting_is_documented_and_read(name: str) -> None:
    tree = ast.parse((ROOT / "chunkcache" / "settings.py").read_text(encoding="utf-8"))
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Settings")
    documented = {
        a.target.id
        for a, b in pairwise(body)
        if isinstance(a, ast.AnnAssign)
        and isinstance(a.target, ast.Name)
        and isinstance(b, ast.Expr)
    }
    assert name in documented, f"setting {name} has no docstring under it"
    uses = re.compile(rf"settings\.{name}\b")
    assert any(uses.search(p.read_text(encoding="utf-8")) for p in _modules()), f"{name} is unread"
    reference = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert f"`{name}`" in reference


def test_error_codes_are_distinct_and_documented() -> None:
    def tree(kind: type[ChunkCacheError]) -> list[type[ChunkCacheError]]:
        return [kind, *(k for sub in kind.__subclasses__() for k in tree(sub))]

    import chunkcache.errors

    kinds = [k for k in tree(ChunkCacheError) if k.__module__ == "chunkcache.errors"]
    text = chunkcache.errors.__doc__ or ""
    for kind in kinds[1:]:
        assert re.search(rf"{kind.__name__}\s+{kind.code}\s+{kind.status}", text), kind
    codes = [k.code for k in kinds if k is not ChunkCacheError]
    own = [c for c in codes if c != ChunkCacheError.code]
    assert len(own) == len(set(own))


def test_no_pickle_on_any_data_path() -> None:
    banned = re.compile(r"\bpickle\b|torch\.load|torch\.save|allow_pickle|(?<!\.)\b(?:eval|exec)\(")
    found = [
        f"{p.relative_to(ROOT)}: {m.group()}"
        for p in _modules()
        for m in [banned.search(_code_only(p))]
        if m and p.relative_to(ROOT) != PICKLE_READER
    ]
    assert not found


def test_the_one_reader_of_pickles_builds_tensors_alone() -> None:
    """It is asked for by command, and it is the restricted one."""
    tree = ast.parse((ROOT / PICKLE_READER).read_text(encoding="utf-8"))
    (load,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    )
    assert [ast.unparse(k.value) for k in load.keywords if k.arg == "weights_only"] == ["True"]
    imports = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "pickle"]
    assert [ast.unparse(n) for n in imports] == ["from pickle import UnpicklingError"]
    users = [p for p in _modules() if "pickle_checkpoint" in p.read_text(encoding="utf-8")]
    assert [str(p.relative_to(ROOT)) for p in users] == ["chunkcache/model/conversion.py"]


def _code_only(path: Path) -> str:
    """The source without strings and comments, which may speak of what is banned."""
    return re.sub(
        r"'[^'\n]*'", "''", ast.unparse(_Blank().visit(ast.parse(path.read_text("utf-8"))))
    )


class _Blank(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        return ast.Constant("")


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, chunkcache; heavy = {'transformers', 'faiss', 'sentence_transformers', "
        "'fastapi', 'torch'} & set(sys.modules); print(sorted(heavy)); "
        "sys.exit(bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
