"""An agent of openai-agents that adds with a tool: `agent_file` of an environment with `source = "harness"`."""

from agents import Agent, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = Agent(name="adder", instructions="Add with the tool. Say the sum alone.", tools=[add])
