"""Run vLLM's own tests of its server against ours: python -m scripts.vllm_tests."""

from scripts.lib.run_main import end_at_sigterm, run_main
from scripts.vllm_tests.command import main

if __name__ == "__main__":
    end_at_sigterm()
    run_main(main)
