"""The environments that come with Headway, by name: import paths, so that none is loaded before it is wanted."""

from collections.abc import Mapping

BUILT_IN: Mapping[str, str] = {
    "maze": "env_service.builtin.grid_games:MazeEnvironment",
    "arithmetic": "env_service.builtin.arithmetic:ArithmeticEnvironment",
    "code_repair": "env_service.builtin.code_repair:CodeRepairEnvironment",
    "tools": "env_service.builtin.tool_use:ToolUseEnvironment",
    "sokoban": "env_service.builtin.grid_games:SokobanEnvironment",
    "sliding_puzzle": "env_service.builtin.grid_games:SlidingPuzzleEnvironment",
    "nim": "env_service.builtin.number_games:NimEnvironment",
    "guessing": "env_service.builtin.number_games:GuessingEnvironment",
    "gymnasium": "env_service.builtin.gymnasium_games:GymnasiumEnvironment",
    "textarena": "env_service.builtin.textarena_games:TextArenaEnvironment",
    "remote": "env_service.hosting.remote:RemoteEnvironment",
    "openenv": "env_service.hosting.openenv:OpenEnvEnvironment",
    "agent": "env_service.agents.program:AgentProgram",
    "verifiers": "env_service.hosting.verifiers_server:VerifiersAgent",
    "nim_duel": "env_service.builtin.duels:NimDuel",
    "tic_tac_toe": "env_service.builtin.duels:TicTacToe",
    "textarena_match": "env_service.builtin.textarena_matches:TextArenaMatch",
    "wordle": "env_service.builtin.wordle:WordleEnvironment",
}
