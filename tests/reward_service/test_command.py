import subprocess
import sys

_PROGRAM = """
import sys
sys.argv = ["reward-service", "--help", "--all"]
from reward_service.command import main
try:
    main()
except SystemExit as exit:
    assert exit.code == 0, exit.code
print("loaded:", sorted({"torch", "fastapi", "uvicorn", "sympy", "reasoning_gym"} & set(sys.modules)))
"""


def test_help_loads_neither_the_server_nor_the_verifiers() -> None:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    assert "--workers.compute-timeout-s" in ended.stdout
    assert "loaded: []" in ended.stdout


def test_the_service_loads_no_mathematics_before_a_worker_needs_it() -> None:
    program = (
        "import sys, reward_service.service; print(sorted({'torch', 'sympy', 'reasoning_gym'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "[]"
