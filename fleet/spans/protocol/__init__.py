"""Layer ranges, plans, messages and statistics of divided models. Pure; knows no connection and no
torch.
"""
