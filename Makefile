# Shortcuts over CMake's presets; `cmake --preset release` and friends work without this file.

.PHONY: demo build test format docs clean
.NOTPARALLEL:  # prerequisites in the order in which they stand

demo: setup-demo build
	build/release/bin/fastweight check
	build/release/bin/fastweight bench --quick
	tools/python.sh demo

build: setup-build
	cmake --preset release -DFASTWEIGHT_BUILD_TESTS=OFF
	cmake --build --preset release

test: setup-test
	tools/test.sh

format: setup-test
	tools/format.sh

docs:
	tools/docs.sh

setup-%:
	@tools/setup.sh $*

clean:
	rm -rf build
