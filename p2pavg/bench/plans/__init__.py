"""`bench plans`: the plans of a round over a network beside each other, predicted and measured."""
