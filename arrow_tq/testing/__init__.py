"""What other projects' tests may use: the conformance suite that every ``Store`` passes."""
