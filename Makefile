# A front for tools/: every target makes .venv on first use. See CONTRIBUTING.md.

.PHONY: help demo demo-unet test lint format docs bench clean

help:
	@echo "make demo       train CosmoFlow on 4 ranks, check it against 1, draw runs/demo/result.png"
	@echo "make demo-unet  learn to segment synthetic CT on 2 ranks, draw runs/demo-unet/result.png"
	@echo "make test       the test suite, but for long tests that CI runs"
	@echo "make lint       the linters"
	@echo "make format     fix what the linters can fix"
	@echo "make docs       the documentation and API reference: build/docs/index.html"
	@echo "make bench      the compiled microbenchmarks; tools/bench NAME runs one of benchmarks/python"
	@echo "make clean      remove what was built (the environment stays)"

demo:
	@tools/bootstrap pydist demo

demo-unet:
	@tools/bootstrap pydist demo unet

test:
	@tools/bootstrap tools/test

lint:
	@tools/bootstrap --group dev tools/lint.sh

format:
	@tools/bootstrap --group dev tools/lint.sh --fix

docs:
	@NO_MKDOCS_2_WARNING=1 tools/bootstrap --group dev mkdocs build --strict

bench:
	@tools/bootstrap tools/bench

clean:
	rm -rf build
