"""Tools of one conversation together: told to the policy by name, called as it says, their results as messages."""

import asyncio
from collections.abc import Mapping, Sequence

from env_service.builtin.toolboxes import Toolbox, ToolFault, cut, name_of
from env_service.environments.interface import Action, Aggregation, ChatMessage, Role, Step, Tool, ToolCall
from env_service.environments.tool_formats import no_such_tool

TOOL_METRICS: Mapping[str, Aggregation] = {"tool_calls": "sum", "tool_errors": "sum"}


class CalledTools:
    """Some toolboxes. `role` is that of results, of which `characters` are shown. `in_turn`: calls of one turn do not
    run side by side.
    """

    def __init__(self, boxes: Sequence[Toolbox], *, role: Role, characters: int, in_turn: bool = False) -> None:
        self._boxes = boxes
        self._role: Role = role
        self._characters = characters
        self._in_turn = in_turn
        self._by_name: dict[str, Toolbox] = {}

    async def offered(self) -> tuple[Tool, ...]:
        """The tools of all of them. Raises ValueError for two of a name."""
        offered = []
        for box in self._boxes:
            for tool in await box.offered():
                if name_of(tool) in self._by_name:
                    raise ValueError(f"two tools are called {name_of(tool)!r}: offer one of them only")
                self._by_name[name_of(tool)] = box
                offered.append(tool)
        return tuple(offered)

    async def answered(self, action: Action) -> Step:
        """The results of an action's calls. One that cannot be read is told to the policy, as a tool's error."""
        if not action.calls:
            told = ChatMessage(self._role, f"error: {action.fault}", name=next(iter(self._by_name)))
            return Step((told,), invalid=True, metrics={"tool_calls": 1.0, "tool_errors": 1.0})
        if self._in_turn:
            results = [await self._result(call) for call in action.calls]
        else:
            results = await asyncio.gather(*map(self._result, action.calls))
        faults = sum(faulty for faulty, _ in results)
        messages = [self._told(call, text) for call, (_, text) in zip(action.calls, results, strict=True)]
        metrics = {"tool_calls": float(len(results)), "tool_errors": float(faults)}
        return Step(tuple(messages), invalid=faults == len(results), metrics=metrics)

    async def close(self) -> None:
        """Ends what the tools hold."""
        for box in self._boxes:
            await box.close()

    def _told(self, call: ToolCall, text: str) -> ChatMessage:
        return ChatMessage(self._role, cut(text, self._characters), name=call.name, tool_call_id=call.id)

    async def _result(self, call: ToolCall) -> tuple[bool, str]:
        """True if the policy called it wrongly, and what it is told."""
        box = self._by_name.get(call.name)
        try:
            if box is None:
                raise ToolFault(no_such_tool(call.name, self._by_name))
            return False, await box.call(call)
        except ToolFault as fault:
            return True, f"error: {fault}"
