"""An agent of smolagents: the user's own one, or one that has the shell of the task's computer."""

import os

from driving import GivenTask, finish, shell
from smolagents import MultiStepAgent, OpenAIModel, ToolCallingAgent, tool


@tool
def run_shell(command: str) -> str:
    """Runs a command line on the task's computer and returns what it prints.

    Args:
        command: a command line for the shell
    """
    return shell(command)


def main() -> None:
    """Run it to its final answer."""
    task = GivenTask()
    model = OpenAIModel(task.model, api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = task.agent()
    if isinstance(agent, MultiStepAgent):
        agent.model = model
    elif agent is not None:  # a function that makes one
        agent = agent(model)
    else:
        tools = [run_shell] if task.folder is not None else []
        agent = ToolCallingAgent(tools=tools, model=model, instructions=task.instructions or None, verbosity_level=0)
    ended = agent.run(task.prompt, max_steps=task.max_turns, return_full_result=True)
    finish(ended.output, stop="finished" if ended.state == "success" else ended.state)


if __name__ == "__main__":
    main()
