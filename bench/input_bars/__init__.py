"""Whether `p2pavg bench input` tells the truth: six made pipelines, each split of them also run for real."""
