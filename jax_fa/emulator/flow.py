"""Control flow: basic blocks and immediate post-dominators (where diverged lanes meet again)."""

from __future__ import annotations

from jax_fa.emulator.ptx import Instruction, Label

EXITS = ("ret", "exit", "trap")


def is_branch(instruction: Instruction) -> bool:
    """True if it is bra in any form."""
    return instruction.opcode.startswith("bra") and instruction.opcode[3:4] in ("", ".")


def is_exit(instruction: Instruction) -> bool:
    """True if it is ret, exit or trap."""
    return instruction.opcode in EXITS


def branch_target(instruction: Instruction) -> int:
    """Instruction index a branch goes to."""
    label = instruction.operands[0]
    if not isinstance(label, Label):
        raise TypeError(f"{instruction}: branch without a label")
    return label.target


def successors(instructions: list[Instruction], starts: list[int]) -> list[list[int]]:
    """Successor blocks of every block; the number of blocks stands for "the thread is gone".

    A guarded exit is no edge: lanes that leave need not be waited for.

    Args:
      instructions: the kernel.
      starts: first instruction of each block, ascending, beginning with 0.
    """
    gone = len(starts)
    block_at = {start: block for block, start in enumerate(starts)}
    block_at[len(instructions)] = gone
    found = []
    for block, _ in enumerate(starts):
        end = starts[block + 1] if block + 1 < gone else len(instructions)
        last = instructions[end - 1]
        following = []
        if is_branch(last):
            following.append(block_at[branch_target(last)])
        elif is_exit(last) and last.guard is None:
            following.append(gone)
        if last.guard is not None or not (is_branch(last) or is_exit(last)):
            following.append(block_at[end])
        found.append(following)
    return found


def join_blocks(following: list[list[int]]) -> list[int]:
    """The blocks where lanes separated by a block's branch meet again (len(following): nowhere).

    The immediate post-dominator. Where there is none because a side exits, the one that holds if
    all exits but the last in the text are left out: lanes that exit need not be waited for.
    """
    gone = len(following)
    exits = [block for block, targets in enumerate(following) if targets == [gone]]
    if not exits:
        return [gone] * gone
    every = _post_dominators(following)
    main = [[] if block in exits[:-1] else targets for block, targets in enumerate(following)]
    last = _post_dominators(main)
    return [last[block] if every[block] == gone else every[block] for block in range(gone)]


def _post_dominators(following: list[list[int]]) -> list[int]:
    """Immediate post-dominators, by iteration (Cooper, Harvey, Kennedy) on the reversed graph."""
    gone = len(following)
    order = _postorder(following)
    join: dict[int, int] = {gone: gone}
    changed = True
    while changed:
        changed = False
        for block in order:
            best = None
            for successor in following[block]:
                if successor in join:
                    best = successor if best is None else _meet(best, successor, join)
            if best is not None and join.get(block) != best:
                join[block] = best
                changed = True
    return [join.get(block, gone) for block in range(gone)]


def _postorder(following: list[list[int]]) -> list[int]:
    """Depth-first post-order from the entry, so that successors mostly come first."""
    gone = len(following)
    seen, order, stack = {0}, [], [(0, iter(following[0]))]
    while stack:
        block, rest = stack[-1]
        for successor in rest:
            if successor != gone and successor not in seen:
                seen.add(successor)
                stack.append((successor, iter(following[successor])))
                break
        else:
            order.append(block)
            stack.pop()
    return order


def _meet(a: int, b: int, join: dict[int, int]) -> int:
    """Nearest common ancestor of two blocks in the post-dominator tree found so far."""
    seen = set()
    while a not in seen:
        seen.add(a)
        a = join[a]
    while b not in seen:
        b = join[b]
    return b
