"""Prompts of the benchmarks: short and long, no two with a common prefix."""

PROMPTS = (
    "Hello, who are you?",
    "What is the capital of Iceland, and what is it known for?",
    "Tell me a short story about a lighthouse keeper who is afraid of the dark.",
    "Count from one to ten.",
    "Explain to a child why the sky is blue and why sunsets are red.",
    "My train leaves at nine and the station is forty minutes away on foot. "
    "When should I set out if I want to have a coffee first?",
    "Read this aloud, slowly: the quick brown fox jumps over the lazy dog.",
    "Give me three reasons to learn to play the piano as an adult.",
    "What should I cook tonight? I have rice, two eggs, half an onion, a carrot, soy sauce and "
    "very little patience.",
    "Say good night.",
    "Describe the taste of an apple to someone who has never eaten fruit.",
    "I would like to write to my landlord about the heating, which has been broken since Monday "
    "although I called twice. "
    "Please draft a polite but firm message that asks for a date.",
    "Why do cats purr?",
    "Summarise in one sentence: the meeting was moved from Tuesday to Thursday because the "
    "projector is being repaired, "
    "and everyone should bring printed slides in case it is not back in time.",
    "Recommend a walk of about two hours with a view.",
    "What is seventeen times twenty-three?",
)


def pick(count: int) -> list[str]:
    """Return `count` prompts in order. The list starts again if `count` exceeds its length, so that
    prompts then repeat.
    """
    return [PROMPTS[index % len(PROMPTS)] for index in range(count)]
