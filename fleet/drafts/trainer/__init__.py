"""Training of draft heads on samples of a target model: checks of arriving samples, a bounded
replay buffer, and optimizer steps over windows of samples.

Everything is in one process and knows neither Redis nor transfers: samples are tensors, and the
target is two functions.
"""
