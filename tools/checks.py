"""Check the house rules that running a notebook cannot check.

Each rule takes the root of the repository and yields a message for every violation.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pair
import yaml
from nbformat import NotebookNode

FIRST = ["What you will learn", "Setup"]
LAST = ["Pitfalls", "Exercises", "Recap", "Next"]
NOT_PORTABLE = {  # syntax that only Sphinx, Jupyter or one website understands
    "a MyST directive": r"^\s*(:::|```\{)",
    "a MyST role": r"\{[a-z:]+\}`",
    "a MyST label": r"^\([\w-]+\)=\s*$",
    "an image link": r"!\[",
    "a link to a chapter's source": r"\]\(\d\d_\w+\.md",
    "HTML": r"</?[a-zA-Z][^>]*>",
}
EXPLAINED = {  # shared cells that a chapter explains and therefore does not fold
    "02_train_on_one_device": "digits",
    "05_collectives": r"chips-\S*",
}
# Maximum AST nodes per line in lesson cells, averaged over a chapter, without the type
# hints of signatures. JAX's guides, which have no type hints, have 11 to 12.5.
DENSEST = 12
EXERCISE = [["exercise"], ["check", "hide-input"], ["solution", "hide-cell"]]  # tags
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
CHECKS_SOMETHING = r"\bassert\b|\bassert_|\bon_cpu\("
SHOWS_SOMETHING = r"^ *(print|plt\.\w+|draw_\w+|HTML|judge|reject)\("
OUTSIDE = {22: {21}}  # what chapters of the course need of those outside it
CALLOUTS = "Predict", "Pitfall", "Takeaway"
INSTEAD = {  # pattern that chapters must not use: what to use instead
    r"jax\.tree_(map|multimap|leaves|flatten|unflatten)\b": "jax.tree.map etc.",
    r"\bjax\.experimental\.(shard_map|pjit|maps)\b": "jax.shard_map or jax.jit",
    r"\blax\.pvary\b": "jax.lax.pcast(..., to='varying')",
    r"\b(xmap|use_mesh|device_put_(replicated|sharded))\b": "book/old_names.md",
    r"\b(Positional|Pmap)Sharding\b": "NamedSharding",
    r"\b(in|out)_axis_resources\b": "in_shardings, out_shardings",
    r"\bcheck_rep\b": "check_vma",
    r"\bcolab_tpu\b": "the setup cell",
    r"\bwith (\w+\.)?mesh\b": "with jax.set_mesh(mesh)",
    r"\bPRNGKey\b": "jax.random.key",
    r"device\.platform [!=]=": "on_cpu(found, expected), for what one compiler does",
}


def tags(cell: NotebookNode) -> list[str]:
    return cell.metadata.get("tags", [])


def shared_names(cell: NotebookNode) -> list[str]:
    """Return NAME of each tag shared-NAME of a cell, in order."""
    return [tag.split("-", 1)[1] for tag in tags(cell) if tag.startswith("shared-")]


def is_lesson(cell: NotebookNode) -> bool:
    """Return whether a code cell is part of the lesson: no helper and no exercise."""
    aside = {"hide-input", "hide-cell", "exercise", "check", "solution"}
    return not shared_names(cell) and not aside & {*tags(cell)}


def syntax(source: str) -> ast.Module:
    """Parse a code cell without its IPython magics."""
    return ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE))


def untyped(tree: ast.AST) -> ast.AST:
    """Remove the type hints of all signatures in place; return the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, FUNCTION):
            node.returns = None
    return tree


def code_lines(cell: NotebookNode) -> int:
    return sum(bool(line.strip()) for line in cell.source.splitlines())


def chapters(root: Path) -> Iterator[tuple[str, list, list, str]]:
    """Yield the name, cells, code cells and Markdown text of each chapter."""
    for path in sorted((root / "notebooks").glob("*.md")):
        cells = pair.twin(path.read_text()).cells
        code = [cell for cell in cells if cell.cell_type == "code"]
        yield path.stem, cells, code, markdown(cells)


def markdown(cells: list[NotebookNode]) -> str:
    """Return the text of the Markdown cells among these cells."""
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def headings(text: str, level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", text, re.MULTILINE)


def everything_is_paired(root: Path) -> Iterator[str]:
    texts, problems = pair.plan(root)
    yield from problems
    for path in texts:
        yield f"{path.relative_to(root)} is out of date. Run: nox -s pair"


def the_address_is_written_once(root: Path) -> Iterator[str]:
    url = yaml.safe_load((root / "_config.yml").read_text())["repository"]["url"]
    elsewhere = ":(exclude)_config.yml", ":(exclude)notebooks"
    words = ["git", "grep", "-lF", url, "--", *elsewhere]
    found = subprocess.run(words, cwd=root, capture_output=True, text=True)
    for file in found.stdout.splitlines():
        yield f"{file} names {url}, which only _config.yml may name"
    if found.returncode > 1:
        yield found.stderr


def shared_cells_are_in_place(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        if not code or shared_names(code[0])[:1] != ["setup"]:
            yield f"{name}: the first code cell is not tagged shared-setup"
        for cell in filter(shared_names, code):
            shared = " ".join(shared_names(cell))
            explained = re.fullmatch(EXPLAINED.get(name, ""), shared)
            if bool(explained) == ("hide-input" in tags(cell)):
                how = "open" if explained else "folded, with hide-input"
                yield f"{name}: the shared cell {shared} must be {how}"


def folded_cells_are_one(root: Path) -> Iterator[str]:
    for name, cells, _, _ in chapters(root):
        for before, cell in pairwise(cells):
            if "hide-input" in {*tags(before)} & {*tags(cell)}:
                line = cell.source.splitlines()[0]
                yield f"{name}: two folded cells in a row, the second with {line!r}"


def chapters_have_the_skeleton(root: Path) -> Iterator[str]:
    for number, (name, cells, _, prose) in enumerate(chapters(root), start=1):
        titles, sections = headings(prose, 1), headings(prose, 2)
        if not re.fullmatch(rf"{number:02}_[a-z0-9_]+", name):
            yield f"{name}: the file of chapter {number} must be {number:02}_slug"
        if not cells[0].source.startswith("# ") or len(titles) != 1:
            yield f"{name}: a chapter must start with its title and have no other"
        elif re.match(r"(chapter\s*)?\d", titles[0], re.IGNORECASE):
            yield f"{name}: remove the number from the title"
        own = sections[len(FIRST) : -len(LAST)]
        if sections != FIRST + own + LAST:
            yield f"{name}: sections must be {FIRST}, its own, {LAST}; found {sections}"
        elif not 3 <= len(own) <= 6:
            yield f"{name}: expected three to six own sections, found {len(own)}"


def code_is_easy_to_read(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        for cell in code:
            free = shared_names(cell) or "solution" in tags(cell)
            if code_lines(cell) > 25 and not free:
                yield f"{name}: cell has over 25 lines: {cell.source.splitlines()[0]}"
        lesson = [cell for cell in code if is_lesson(cell)]
        trees = [untyped(syntax(cell.source)) for cell in lesson]
        nodes = sum(1 for tree in trees for _ in ast.walk(tree))
        density = nodes / max(1, sum(map(code_lines, lesson)))
        if density > DENSEST:
            yield (
                f"{name}: {density:.1f} AST nodes per line, more than {DENSEST}:"
                " name intermediate values, so that each line does one thing"
            )


def is_body(function: ast.FunctionDef) -> bool:
    """Return whether shard_map decorates a function: comments give its local shapes."""
    return any("shard_map" in ast.unparse(each) for each in function.decorator_list)


def lessons_have_types(root: Path) -> Iterator[str]:
    form = "(x: jax.Array, n: int) -> jax.Array"
    for name, _, code, _ in chapters(root):
        trees = [syntax(cell.source) for cell in code if is_lesson(cell)]
        for node in [node for tree in trees for node in ast.walk(tree)]:
            if isinstance(node, FUNCTION) and not is_body(node):
                found = [a for a in ast.walk(node.args) if isinstance(a, ast.arg)]
                bare = [a.arg for a in found if not a.annotation and a.arg != "self"]
                if bare or not node.returns:
                    yield f"{name}: add type hints to def {node.name}, as in {form}"


def chapters_show_and_tell(root: Path) -> Iterator[str]:
    for name, _, code, prose in chapters(root):
        words = len(prose.split())
        if not 1500 <= words <= 3600:
            yield f"{name}: expected 1,500 to 3,600 words, found {words}"
        shown = [c for c in code if re.search(SHOWS_SOMETHING, c.source, re.MULTILINE)]
        if len(shown) < 10:
            yield f"{name}: only {len(shown)} cells print or draw; at least ten must"
        for label in CALLOUTS:
            if not re.search(rf"^(> )?\*\*{label}\.\*\*", prose, re.MULTILINE):
                yield f"{name}: no paragraph starts with **{label}.**"


def predictions_are_left_to_the_reader(root: Path) -> Iterator[str]:
    for name, cells, _, _ in chapters(root):
        for before, cell in pairwise(cells):
            check = re.search(CHECKS_SOMETHING, cell.source)
            if "**Predict.**" in before.source and check:
                yield f"{name}: the cell after a Predict has a check: {check[0]!r}"


def markdown_is_portable(root: Path) -> Iterator[str]:
    for name, _, _, prose in chapters(root):
        source = re.sub(r"^```\w*\n(?s:.*?)^```$", "", prose, flags=re.MULTILINE)
        plain = re.sub(r"`[^`\n]*`|\$[^$\n]*\$", "", source)
        for what, pattern in NOT_PORTABLE.items():
            where = source if "role" in what else plain
            for found in re.finditer(pattern, where, re.MULTILINE):
                yield f"{name}: {what}, {found[0]!r}, is not portable"


def drawings_in_html_have_a_label(root: Path) -> Iterator[str]:
    """Tests of the built site check the alt texts of other figures."""
    for name, _, code, _ in chapters(root):
        for cell in code:
            draws = re.search(r"^HTML\(", cell.source, re.MULTILINE)
            if draws and not re.search(r'aria-label="[^"]{20}', cell.source):
                yield f"{name}: a drawing in HTML has no aria-label"


def code_is_of_today(root: Path) -> Iterator[str]:
    for name, _, code, _ in chapters(root):
        for cell in code:
            for old, new in INSTEAD.items():
                # Shared cells have tests and may use names of older releases.
                if (found := re.search(old, cell.source)) and not shared_names(cell):
                    yield f"{name}: {found[0]!r} is out of date; use {new}"
            if "raises-exception" in tags(cell):
                yield f"{name}: raises-exception always passes; use try/except/else"


def exercises(cells: list[NotebookNode]) -> dict[str, list[NotebookNode]]:
    """Return the code cells under each heading "Exercise N: ..." of a chapter."""
    found, title = {}, ""
    for cell in cells:
        if cell.cell_type == "markdown":
            for title in re.findall(r"^#{2,3} (.+)$", cell.source, re.MULTILINE):
                if title.startswith("Exercise "):
                    found[title] = []
        elif title in found:
            found[title].append(cell)
    return found


def functions(cell: NotebookNode) -> dict[str, ast.FunctionDef]:
    body = syntax(cell.source).body
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> str:
    """Return the parameters of a signature without type hints."""
    return ast.unparse(untyped(function.args))


def calls(cell: NotebookNode, name: str) -> list[list[str]]:
    """Return the arguments, as source text, of each call of the named function."""
    return [
        [ast.unparse(argument) for argument in node.args]
        for node in ast.walk(syntax(cell.source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name
    ]


def is_stub(function: ast.FunctionDef) -> bool:
    """Return whether a body is a docstring and raises NotImplementedError."""
    rest = [ast.unparse(node) for node in function.body[1:]]
    return bool(ast.get_docstring(function)) and rest == ["raise NotImplementedError"]


def exercise_faults(cells: list[NotebookNode]) -> Iterator[str]:
    """Yield what is wrong with the three cells of an exercise."""
    cells = [cell for cell in cells if tags(cell) in EXERCISE]
    if [tags(cell) for cell in cells] != EXERCISE:
        yield f"three cells must have the tags {EXERCISE}, in this order"
        return
    stub_cell, check_cell, solution_cell = cells
    for cell, title in (check_cell, "Check"), (solution_cell, "Solution"):
        if not cell.source.startswith(f"# @title {title}\n"):
            yield f"the cell tagged {tags(cell)[0]} must start with # @title {title}"
    stubs = [stub for stub in functions(stub_cell).values() if is_stub(stub)]
    if len(stubs) != 1:
        yield "expected one stub: a docstring, then raise NotImplementedError"
        return
    (stub,) = stubs
    if "def check(answer" not in check_cell.source:
        yield "the check must define check(answer)"
    if use := re.search(r"\banswer\.\w+", check_cell.source):
        yield f"the check uses {use[0]}, which is not in the stub"
    if ast.unparse(syntax(check_cell.source).body[-1]) != f"judge(check, {stub.name})":
        yield f"the check must end with judge(check, {stub.name})"
    defined = functions(solution_cell)
    if stub.name in defined:
        yield f"the solution overwrites the reader's {stub.name}"
    if "answer" not in defined or ["answer"] not in calls(solution_cell, "check"):
        yield "the solution must define answer and call check(answer)"
    rejected = calls(solution_cell, "reject")
    wrong = [arguments[-1] for arguments in rejected if arguments[0] == "check"]
    if not wrong or not {*wrong} <= {*defined}:
        yield "the solution must define a wrong answer and call reject(check, it)"
    for name in {"answer", *wrong} & {*defined}:
        if parameters(defined[name]) != parameters(stub):
            yield f"the signature of {name} must be that of {stub.name}"


def exercises_judge_the_reader(root: Path) -> Iterator[str]:
    for name, cells, _, _ in chapters(root):
        found = exercises(cells)
        if not 2 <= len(found) <= 4:
            yield f"{name}: expected two to four exercises, found {len(found)}"
        for title, own in found.items():
            for fault in exercise_faults(own):
                yield f"{name}, {title}: {fault}"


def needs(text: str) -> set[int]:
    """Return the chapters that a chapter links to where it says what it needs."""
    line = re.search(r"^You need .*?\bminutes\b|\Z", text, re.MULTILINE)[0]
    return {*map(int, re.findall(r"\b(\d\d)_\w+\.ipynb", line))}


def the_course_builds_on_itself(root: Path) -> Iterator[str]:
    """What a chapter of the course needs is an earlier chapter of the course."""
    texts = {int(name[:2]): prose for name, _, _, prose in chapters(root)}
    for number, text in texts.items():
        if not re.search("^You need ", text, re.MULTILINE):
            yield f"chapter {number}: no line under its bullets starts with 'You need'"
    course = [int(path.stem[:2]) for path in pair.listed(root, "course")]
    for place, number in enumerate(course):
        found, known = needs(texts.get(number, "")), OUTSIDE.get(number, set())
        if other := sorted(found - {*course[:place]} - known):
            yield f"chapter {number} is in the course of _toc.yml and needs {other}"
        if number in texts and known - found:
            yield f"checks.py: OUTSIDE names more than chapter {number} needs"


def contents_match_the_files(root: Path) -> Iterator[str]:
    toc = yaml.safe_load((root / "_toc.yml").read_text())
    listed = [chapter["file"] for part in toc["parts"] for chapter in part["chapters"]]
    sources = [*(root / "notebooks").glob("*.md"), *(root / "book").glob("*.md")]
    files = {f"{path.parent.name}/{path.stem}" for path in sources}
    for file in sorted(files - {toc["root"], *listed}):
        yield f"_toc.yml leaves out {file}: list it in a part"
    in_toc = [file for file in listed if file.startswith("notebooks/")]
    if in_toc != sorted(in_toc):
        yield "_toc.yml lists chapters in another order than that of their numbers"


CHECKS = [
    everything_is_paired,
    the_address_is_written_once,
    shared_cells_are_in_place,
    folded_cells_are_one,
    chapters_have_the_skeleton,
    code_is_easy_to_read,
    lessons_have_types,
    chapters_show_and_tell,
    predictions_are_left_to_the_reader,
    markdown_is_portable,
    drawings_in_html_have_a_label,
    code_is_of_today,
    exercises_judge_the_reader,
    the_course_builds_on_itself,
    contents_match_the_files,
]
