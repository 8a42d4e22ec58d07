"""在仓库的文件夹里也可以 import common · `import common` works in the repository's folder."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))

from triton_course import *  # noqa: E402, F403
