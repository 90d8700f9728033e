"""Generated from protos/ by ./run generate; never edited."""
