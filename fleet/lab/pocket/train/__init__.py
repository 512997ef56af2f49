"""Training of Pocket's parts: one resumable run for each part, all with the training loop in
`loop`.
"""
