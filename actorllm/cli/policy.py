"""`actorllm policy check`: what every hook of a scheduling or admission policy answers, without an engine.

Owns how that is printed; what is tried is in `actorllm.scheduling.policy_check`.
"""

from __future__ import annotations

from cyclopts import App

from actorllm.cli.options import see_own_folder

policy = App(name="policy", help="Scheduling and admission policies of your own.")


@policy.command
def check(name: str, /, *, attributes: bool = True) -> int:
    """Call every hook of the policy NAME on made-up requests, in this process, and say what came of each.

    Exit status 1 when a hook raises, or returns what is no answer.

    Parameters
    ----------
    name
        A class as module:Class, also of a module of this folder; or the name of a built-in policy.
    attributes
        List what a policy may read of a request and of the scheduler, too.
    """
    from actorllm.scheduling.policy_check import check_policy, readable

    if ":" in name:
        see_own_folder()
    found = check_policy(name)
    print(f"{name} ({found.kind})")
    print()
    for hook in found.hooks:
        print(f"  {hook.name:<13} {hook.told}")
    if attributes:
        for cls, rows in readable().items():
            print()
            print(f"A policy may read of {'a request' if cls == 'Sequence' else 'the scheduler'} ({cls}):")
            print()
            for attribute, text in rows:
                print(f"  {attribute:<21} {text}")
    return 1 if found.num_failures else 0
