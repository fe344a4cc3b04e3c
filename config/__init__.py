"""
Settings for the four scripts: plain globals at a script's top, overridden by recipes and flags.

    python train.py config/quickstart.py --max_iters=100     recipe first, then one setting
    python train.py --help                                   every setting, its default and meaning

Later wins. One recipe drives all four scripts: each takes the keys it has and passes over the
rest; a key that none of them has is an error. Sibling scripts are read as text, never run.
"""
import ast
import contextlib
import difflib
import math
import os
import re
import runpy
import sys
from pathlib import Path

SCRIPTS = ("prepare.py", "train.py", "sample.py", "hellaswag.py")

def fail(message):
    """End the program over something its user can mend: one line on stderr, exit status 2."""
    print(" ".join(str(message).split()), file=sys.stderr, flush=True)
    sys.exit(2)

def nearest(word, known):
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""

def settings_of(script):
    """{key: meaning}: the lower-case names that a script assigns, one a line, before its defs."""
    lines, found = Path(script).read_text(encoding="utf-8").splitlines(), {}
    for node in ast.parse("\n".join(lines)).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            break
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").islower():
            meaning = lines[node.end_lineno - 1][node.end_col_offset:].partition("#")[2]
            found[node.targets[0].id] = meaning.strip()
    return found

def convert(key, value, want, where):
    """
    value (a flag's text or a recipe's object) as the type want: one rule for both.

    >>> convert("max_iters", "1e3", int, "--max_iters"), convert("compile", "FALSE", bool, "x.py")
    (1000, False)
    """
    text = str(value).strip()
    with contextlib.suppress(ValueError, KeyError):
        if want is str and isinstance(value, str):
            return value
        if want is bool:
            return {"true": True, "false": False}[text.lower()]
        if want is float and math.isfinite(float(text)):
            return float(text)
        if want is int and re.fullmatch(r"[-+]?\d[\d_]*", text):
            return int(text)  # not by way of float, which is exact to 2**53 only
        if want is int and float(text).is_integer():
            return int(float(text))
    fail(f"{where}: {key} wants {want.__name__}, got {value!r}")

def read_recipe(path):
    """The settings in a recipe: _names, modules, functions and classes are its own business."""
    if not os.path.isfile(path):
        fail(f"{path}: no such config file" + nearest(path, map(str, Path("config").glob("*.py"))))
    try:
        names = runpy.run_path(path)
    except (Exception, SystemExit) as error:
        fail(f"{path}: {type(error).__name__}: {error}")
    own = {key for key in names if key.startswith("_") or callable(names[key])}
    return {k: v for k, v in names.items() if k not in own and not isinstance(v, type(sys))}

def configure(script, argv=None, echo=None):
    """Override a script's settings (script: its globals()) from argv; prints and returns them."""
    getattr(sys.stdout, "reconfigure", dict)(errors="replace")  # notebooks lack it
    mine, folder = settings_of(script["__file__"]), Path(script["__file__"]).parent
    defaults = {key: script[key] for key in mine if isinstance(script[key], (str, int, float))}
    anyones = set(mine).union(*map(settings_of, filter(Path.exists, map(folder.joinpath, SCRIPTS))))
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(script["__doc__"].strip() + "\n\nSettings, as --key=value or in a config file:")
        for key, default in defaults.items():
            print(f"  {key:22} {type(default).__name__:6} {default!r:28} {mine[key]}")
        sys.exit(0)
    for arg in argv:
        flag, equals, text = arg.removeprefix("--").partition("=")
        recipe, known = not arg.startswith("-"), defaults if arg.startswith("-") else anyones
        for key, value in (read_recipe(arg) if recipe else {flag: text}).items():
            if key not in known:
                fail(f"{arg}: no setting {key!r}" + nearest(key, known))
            if not (recipe or equals):
                fail(f"{arg}: write it as --{key}=VALUE")
            if key in defaults:
                script[key] = convert(key, value, type(defaults[key]), arg)
    settings = {key: script[key] for key in defaults}
    if os.environ.get("RANK", "0") in ("0", ""):
        print("settings:", *(f"{k}={v!r}" for k, v in settings.items()), file=echo, flush=True)
    return settings
