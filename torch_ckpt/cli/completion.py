"""``torch-ckpt completion``: prints a script by which a shell completes the command.

The script is made from the parser of all commands, so it has the options that they have.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch_ckpt.cli.arguments import path_of
from torch_ckpt.cli.terminal import SOUND

__all__ = ["add_to"]

_SCRIPT = """\
_torch_ckpt() {{
  local i command= fits= word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}}
  ((COMP_CWORD > 1)) && command=${{COMP_WORDS[1]}}
  [[ $before == "=" ]] && before=${{COMP_WORDS[COMP_CWORD - 2]}}
  [[ $word == "=" ]] && word=
  for ((i = 2; i < COMP_CWORD; i++)); do
    case "$command ${{COMP_WORDS[i]}}" in
{scripts}    esac
  done
  case "$command $before" in
{values}    *) case "$command $word" in
{words}    esac ;;
  esac
  COMPREPLY=($(compgen -W "$fits" -- "$word"))
}}
complete -o default -F _torch_ckpt torch-ckpt
"""
"""Without COMPREPLY, the shell completes names of files, by ``-o default``."""

_ZSH = """\
(($+functions[compdef])) || { autoload -Uz compinit && compinit; }
autoload -Uz bashcompinit && bashcompinit
"""

_NOTHING = "compopt +o default 2>/dev/null"  # zsh has no compopt.


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        help="print a script that completes this command in a shell",
        description="Prints a script by which bash or zsh completes commands, options, choices "
        'and paths. This line of ~/.bashrc enables it: eval "$(torch-ckpt completion bash)". '
        "Exit status: 0.",
    )
    parser.add_argument("shell", choices=("bash", "zsh"), help="shell that reads the script")
    parser.set_defaults(command=_completion)


def _completion(options: argparse.Namespace) -> int:
    print((_ZSH if options.shell == "zsh" else "") + _script(options.program()), end="")
    return SOUND


def _script(program: argparse.ArgumentParser) -> str:
    scripts = values = words = ""
    parsers = next(a for a in program._actions if isinstance(a, argparse._SubParsersAction)).choices
    for name, parser in {"": program, **parsers}.items():
        flags = " ".join(flag for action in parser._actions for flag in action.option_strings)
        words += f"    '{name} -'*) fits='{flags}' ;;\n"
        for action in parser._actions:
            fits = f"fits='{' '.join(action.choices)}'" if action.choices else _NOTHING
            if action.option_strings and action.nargs != 0:
                pattern = "|".join(f"'{name} {flag}'" for flag in action.option_strings)
                values += f"    {pattern}) {'' if action.type is path_of else fits} ;;\n"
                scripts += f"    {pattern}) ((i++)) ;;\n"
            elif action.nargs == argparse.REMAINDER:  # Options behind it are those of the script.
                scripts += f"    '{name} '[!-]*) return ;;\n"
            elif action.choices:
                words += f"    '{name} '*) {fits} ;;\n"
    return _SCRIPT.format(scripts=scripts, values=values, words=words)
