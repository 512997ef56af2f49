"""Statistics of speculation and training, as workers publish and readers see them. Data only."""
