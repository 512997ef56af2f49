"""Plugin of vLLM's that registers the Thinker's model class in every process of vLLM, tensor
parallel workers included.

vLLM finds it as an entry point of the installed package. Source: vllm 0.32, plugins/__init__.py.
"""

from fleet.engine.vllm.start import TappedModel

# The encoder of images and video is not loaded.
TAPPED_THINKER = TappedModel(
    architecture="FleetQwen3OmniThinker", media_limits={"image": 0, "video": 0}
)
REFERENCE = "fleet.models.qwen3_omni.vllm_thinker:TappedThinker"


def register() -> None:
    """Register the Thinker's model class with vLLM by name; vLLM imports the class on first use."""
    from vllm import ModelRegistry

    if TAPPED_THINKER.architecture not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(TAPPED_THINKER.architecture, REFERENCE)
