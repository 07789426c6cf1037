# Install rules: headers, the target mega::mega, and the package files that find the components.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/mega)
install(TARGETS mega EXPORT mega-targets FILE_SET HEADERS)
install(EXPORT mega-targets NAMESPACE mega:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/mega-config.cmake.in
                              ${PROJECT_BINARY_DIR}/package/mega-config.cmake
                              INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break its users; nothing compiled is installed, so any
# architecture will do.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/package/mega-config-version.cmake
                                 COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES ${PROJECT_BINARY_DIR}/package/mega-config.cmake
              ${PROJECT_BINARY_DIR}/package/mega-config-version.cmake
              ${PROJECT_SOURCE_DIR}/cmake/mega-components.cmake
        DESTINATION ${package_dir})
