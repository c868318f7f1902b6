# Shortcuts over CMake's presets; `cmake --preset release` and friends work without this file.

.PHONY: demo build test format setup clean

demo: build
	build/release/bin/fastweight check
	build/release/bin/fastweight bench --quick
	tools/python.sh demo

build: setup
	cmake --preset release
	cmake --build --preset release

test: setup
	tools/test.sh

format: setup
	tools/format.sh

setup:
	@tools/setup.sh

clean:
	rm -rf build
