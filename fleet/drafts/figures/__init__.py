"""Statistics of speculation and training, as workers publish them and readers see them. Pure."""
